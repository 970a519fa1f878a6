"""What is made of the states of hosts, and of a record in another folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from submitting import write_job

from stoker.cluster.chosen_target import choose_target
from stoker.cluster.claim import CLAIMED
from stoker.cluster.record import Record
from stoker.cluster.shell import ShellFailed
from stoker.cluster.ssh import host_addresses
from stoker.cluster.ssh.connection import Connection
from stoker.cluster.ssh.host_addresses import with_address
from stoker.cluster.ssh.host_file import Host
from stoker.cluster.ssh.host_states import status_of
from stoker.cluster.ssh.ssh_target import SshTarget, open_target
from stoker.cluster.submission import submission_of
from stoker.cluster.submitted_run import target_of
from stoker.errors import CannotRun, RunFailed, UserError
from stoker.job import load_job


@pytest.mark.parametrize(
    ("states", "requeue", "state", "why"),
    [
        ({"a": "running", "b": "ended 1"}, None, "running", "b ended with exit code 1"),
        ({"a": "running", "b": "cannot be reached: no route"}, None, "running", "b: cannot be reached: no route"),
        ({"a": "ended 0", "b": "ended 1"}, None, "done", "b ended with exit code 1"),
        (
            {"a": "ended 143", "b": "ended 137"},
            None,
            "stopped",
            "a ended with exit code 143; b ended with exit code 137",
        ),
        ({"a": "ended 99"}, 99, "stopped", "a ended with exit code 99"),
        ({"a": "ended 2", "b": "gone"}, None, "failed", "a ended with exit code 2; b has no supervisor"),
        ({"a": "gone", "b": "gone"}, None, "lost", "a has no supervisor; b has no supervisor"),
    ],
)
def test_the_state_of_a_run(states: dict[str, str], requeue: int | None, state: str, why: str) -> None:
    found = status_of(states, requeue)
    assert (found.state, found.why) == (state, why)


def test_a_record_needs_no_file_of_the_folder_it_was_made_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hosts").write_text("a slots=2\nb slots=2\nc slots=2\n")
    (tmp_path / "config").touch()
    block = {"hostfile": "hosts", "exclude": "a", "config": "config"}
    loaded = load_job(write_job(tmp_path, target={"ssh": block}, parallel={"data": 2}))
    chosen = choose_target(loaded, None)
    target = open_target(chosen)
    assert target.host_count() == 2
    submission = submission_of(loaded, chosen, tmp_path, hosts=2)
    record = Record.from_json(target._record(submission, target._taken(submission)).to_json())
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert record.target["config"] == str(tmp_path / "config")
    assert target_of(record).host_count() == 2 and [host["name"] for host in record.handle["hosts"]] == ["b", "c"]


def test_the_last_hosts_are_spares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    block = {"hosts": ["a", "b", "c"], "spares": 1}
    loaded = load_job(write_job(tmp_path, target={"ssh": block}, parallel={"data": 4}))
    chosen = choose_target(loaded, None)
    target = open_target(chosen)
    assert target.host_count() == 2
    submission = submission_of(loaded, chosen, tmp_path, hosts=target.host_count())
    assert (submission.nodes, submission.devices, submission.hosts) == (2, 2, 3)
    text = target.preview(submission)
    assert "to 3 hosts, 2 on each; the last 1 wait as spares" in text and "--nodes 2 " in text
    assert text.count(f":{submission.port}") == 3  # the spare is found, too
    launched = {name: next(line for line in part.splitlines() if "setsid" in line) for name, part in parts_of(text)}
    assert {name for name, line in launched.items() if "--spare" in line} == {"c"}

    record = target._record(submission, target._taken(submission))
    commands: list[str] = []
    monkeypatch.setattr(Connection, "words", lambda *_: ["echo", CLAIMED])
    monkeypatch.setattr(Connection, "run", lambda self, command, **_: commands.append(command) or b"gone")
    target.resume(record)
    assert [line.partition("start.sh ")[2][0] for line in commands if "--spare" in line] == ["c"]
    commands.clear()
    states = {"a": b"running", "b": b"gone", "c": b"gone"}
    monkeypatch.setattr(Connection, "run", lambda self, command, **_: commands.append(command) or states[self.name])
    target.resume(record)
    assert [line.partition("start.sh ")[2][0] for line in commands if "--spare" in line] == ["c"]
    with pytest.raises(UserError, match="`spares: 3` leaves none of the 3 hosts to train"):
        open_target(choose_target(load_job(tmp_path / "job.yaml", ["target.ssh.spares=3"]), None))
    with pytest.raises(CannotRun, match="3 nodes are needed, and the target has 2 hosts beside its spares"):
        more = load_job(tmp_path / "job.yaml", ["parallel.data=3", "target.ssh.nodes=3"])
        submission_of(more, choose_target(more, None), tmp_path, hosts=2)


def parts_of(text: str) -> list[tuple[str, str]]:
    """The commands of each host of a preview, by the host's name."""
    return [(part.split("\n", 1)[0], part) for part in text.split("\n# ") if "setsid" in part.split("\n\n", 1)[0]]


@pytest.mark.parametrize(
    ("host", "told"),
    [
        ({"name": "-oProxyCommand=touch /tmp/x"}, "begins with a hyphen"),
        ({"name": ""}, "begins with a hyphen"),
        ({"user": "-l"}, "begins with a hyphen"),
        ({"address": "a b"}, "contains ' '"),
        ({"port": "22"}, "the port '22'"),
        ({"port": -1}, "the port -1"),
        ({"slots": ["x"]}, "'x'"),
        ({"slots": 7}, "int"),
        ({"name": 7}, "string"),
        ({"other": 1}, "other"),
    ],
)
def test_a_host_in_a_record_is_checked_before_ssh_is_given_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: dict[str, Any], told: str
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a command was started")

    loaded = load_job(write_job(tmp_path, target={"ssh": {"hosts": ["a"]}}))
    chosen = choose_target(loaded, None)
    target = open_target(chosen)
    submission = submission_of(loaded, chosen, tmp_path, hosts=1)
    made = target._record(submission, target._taken(submission))
    good = made.handle["hosts"][0]
    monkeypatch.setattr("subprocess.Popen", refuse)
    for hosts in ([{**good, **host}], [{key: value for key, value in good.items() if key != "slots"}], {"a": 1}, None):
        record = Record.from_json(replace(made, handle={**made.handle, "hosts": hosts}).to_json())
        with pytest.raises(UserError, match=r"the record of \S+ is damaged") as refused:
            target.status(record)
        assert hosts != [{**good, **host}] or told in str(refused.value)


@pytest.mark.parametrize("key", ["hosts", "requeue"])
def test_a_record_without_a_value_of_its_handle_is_refused(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load_job(write_job(tmp_path, target={"ssh": {"hosts": ["a"]}}))
    chosen = choose_target(loaded, None)
    target = open_target(chosen)
    monkeypatch.setattr(target._supervisors, "states", lambda _, hosts: dict.fromkeys(hosts, "running"))
    record = target._record(submission_of(loaded, chosen, tmp_path, hosts=1), target._hosts)
    assert target.status(record).state == "running"
    damaged = replace(record, handle={name: value for name, value in record.handle.items() if name != key})
    with pytest.raises(UserError, match=rf"the record of \S+ is damaged: it has no handle\.{key}"):
        target.status(damaged)


@pytest.mark.parametrize(
    ("block", "told"),
    [
        ({"hosts": ["a"], "jump": "-oProxyCommand=x"}, "`-oProxyCommand=x` begins with a hyphen"),
        ({"hosts": ["a"], "jump": "me@b:22,c d"}, "`c d` contains ' '"),
        ({"hosts": ["a"], "user": "-l"}, "`-l` begins with a hyphen"),
        ({"hosts": ["a"], "jump": "b", "options": {"ProxyJump": "a"}}, "`jump` and the option ProxyJump"),
        ({"hosts": ["a"], "options": {"A b": "c"}}, "`A b` is not the name of an option"),
        ({"hosts": ["a"], "options": {"SetEnv": "A=b\nC=d"}}, "the value has several lines"),
    ],
)
def test_what_ssh_would_misread_is_refused(tmp_path: Path, block: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError) as error:
        open_target(choose_target(load_job(write_job(tmp_path, target={"ssh": block})), None))
    assert told in str(error.value) and error.value.problems[0].column


@pytest.mark.parametrize("key", ["identity", "config"])
def test_a_file_for_ssh_that_does_not_exist_is_named(tmp_path: Path, key: str) -> None:
    loaded = load_job(write_job(tmp_path, target={"ssh": {"hosts": ["a"], key: "no/such"}}))
    chosen = choose_target(loaded, None)
    with pytest.raises(UserError, match=r"job.yaml:1:\d+: there is no file no/such"):
        open_target(chosen).preview(submission_of(loaded, chosen, tmp_path, hosts=1))


def test_hosts_keep_their_index_when_some_are_left_out(tmp_path: Path) -> None:
    block = {"hosts": ["a slots=2", "me@b slots=1", "[fe80::1] slots=2"], "exclude": "a"}
    loaded = load_job(write_job(tmp_path, target={"ssh": block}, parallel={"data": 4}))
    chosen = choose_target(loaded, None)
    target = open_target(chosen)
    submission = submission_of(loaded, chosen, tmp_path, hosts=2)
    with pytest.raises(UserError) as error:
        target.preview(submission)
    assert [problem.key for problem in error.value.problems] == ["target.ssh.hosts[1]"]
    record = target._record(submission, target._taken(submission))
    assert target_of(record).host_count() == 2  # with an IPv6 address among them


def test_a_host_with_fewer_slots_than_processes_is_named(tmp_path: Path) -> None:
    loaded = load_job(write_job(tmp_path, target={"ssh": {"hosts": ["a slots=2", "b slots=1"]}}, parallel={"data": 4}))
    chosen = choose_target(loaded, None)
    with pytest.raises(UserError, match=r"job.yaml:1:\d+: b has 1 slots, but each host runs 2 processes") as error:
        open_target(chosen).preview(submission_of(loaded, chosen, tmp_path, hosts=2))
    assert error.value.exit_code == 3


class Hosts:
    """Hosts in given states, and which of them were asked to start a supervisor."""

    def __init__(self, states: dict[str, str]) -> None:
        self.states = states
        self.started: list[str] = []
        self.asked: list[str] = []
        self.stopped: list[str] = []

    def connection(self, host: Host) -> Any:
        return HostOf(self, host.name)


class HostOf:
    """The connection to one of `Hosts`."""

    def __init__(self, hosts: Hosts, name: str) -> None:
        self._hosts, self._name = hosts, name

    name, destination = "a", "a"

    def words(self, script: str) -> list[str]:
        return ["echo", CLAIMED]

    def run(self, script: str, **_: object) -> bytes:
        if "setsid" in script:
            self._hosts.started.append(self._name)
            return b""
        (self._hosts.stopped if "kill -TERM" in script else self._hosts.asked).append(self._name)
        state = self._hosts.states[self._name]
        if state.startswith("cannot"):
            raise ShellFailed(self._name, 255, state)
        return state.encode()


def submitted(folder: Path, states: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> tuple[Hosts, SshTarget, Record]:
    """Hosts in given states, their target, and the record of a run on all of them."""
    hosts = Hosts(states)
    monkeypatch.setattr(SshTarget, "_connection", lambda _, host: hosts.connection(host))
    loaded = load_job(write_job(folder, target={"ssh": {"hosts": [*states]}}, parallel={"data": len(states)}))
    chosen = choose_target(loaded, None)
    target = open_target(chosen)
    submission = submission_of(loaded, chosen, folder, hosts=len(states))
    return hosts, target, target._record(submission, target._taken(submission))


@pytest.mark.parametrize(
    ("states", "started", "words"),
    [
        ({"a": "ended 143", "b": "gone"}, ["a", "b"], None),
        ({"a": "running", "b": "gone", "c": "ended 1"}, ["b", "c"], "b, c; job is running on a"),
        ({"a": "running", "b": "gone", "c": "ended 0"}, ["b"], "b; job is running on a"),
        ({"a": "running", "b": "gone", "c": "cannot be reached: x"}, ["b"], "b; job is running on a; c: cannot be"),
    ],
)
def test_resume_starts_supervisors_where_none_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, states: dict[str, str], started: list[str], words: str | None
) -> None:
    hosts, target, record = submitted(tmp_path, states, monkeypatch)
    told = target.resume(record).handle.get("started")
    assert sorted(hosts.started) == started
    assert (told is None) if words is None else told.startswith(words)


@pytest.mark.parametrize(
    ("states", "told"),
    [
        ({"a": "running", "b": "running"}, "job is running on a, b; no action is needed"),
        ({"a": "running", "b": "cannot be reached: no route"}, "b: cannot be reached: no route; try again"),
    ],
)
def test_resume_is_refused_where_no_supervisor_can_be_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, states: dict[str, str], told: str
) -> None:
    hosts, target, record = submitted(tmp_path, states, monkeypatch)
    with pytest.raises(UserError) as refused:
        target.resume(record)
    (problem,) = refused.value.problems
    assert told in f"{problem.message}; {problem.suggestion}"
    assert not hosts.started


@pytest.mark.parametrize(
    ("states", "stopped", "told"),
    [
        ({"a": "running", "b": "cannot be reached: x"}, ["a"],
         "job is stopped on a, and may be running on b (b: cannot be reached: x); `stoker stop job` again"),
        ({"a": "ended 143", "b": "cannot be reached: x", "c": "cannot be reached: y"}, ["a"],
         "job runs on none of the hosts that answer, and may be running on b, c (b: cannot be reached: x; c: "),
    ],
)  # fmt: skip
def test_stop_says_which_hosts_it_has_not_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, states: dict[str, str], stopped: list[str], told: str
) -> None:
    hosts, target, record = submitted(tmp_path, states, monkeypatch)
    assert target.status(record).unreached == [host for host in states if host not in stopped]
    with pytest.raises(RunFailed) as failed:
        target.stop(record)
    assert str(failed.value).startswith(told)
    assert hosts.stopped == stopped
    assert hosts.asked.count("b") == 1  # a host that does not answer is waited for once


def test_the_columns_of_a_description_are_as_wide_as_what_they_contain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {"a": "running", "a-host-with-a-long-name-1": "cannot be reached: x"}
    _, target, record = submitted(tmp_path, names, monkeypatch)
    lines = [line.split("  ") for line in target.describe(record)]
    assert [[cell.strip() for cell in line if cell][0:2] for line in lines] == [[*item] for item in names.items()]


def test_resume_names_the_hosts_where_none_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, target, record = submitted(tmp_path, {"a": "cannot be reached: x", "b": "cannot be reached: y"}, monkeypatch)
    with pytest.raises(RunFailed, match="a: cannot be reached: x\nb: cannot be reached: y"):
        target.resume(record)


class Somewhere:
    """A host with these addresses, which ssh reaches by a name."""

    def __init__(self, name: str, own: str) -> None:
        self._name, self._own = name, own

    def real_name(self) -> str:
        return self._name

    def run(self, script: str) -> bytes:
        return self._own.encode()


@pytest.mark.parametrize(
    ("name", "own", "address"),
    [
        ("gpu1", "10.0.0.1 fe80::1", "10.0.0.1"),
        ("gpu2", "10.0.0.2 172.17.0.1", "10.0.0.2"),
        ("127.0.0.2", "10.0.0.1", "127.0.0.2"),
        ("localhost", "10.0.0.1", "127.0.0.1"),
    ],
)
def test_a_host_is_reached_at_its_own_address(
    monkeypatch: pytest.MonkeyPatch, name: str, own: str, address: str
) -> None:
    known = {"gpu1": ["127.0.1.1"], "gpu2": ["127.0.1.1", "10.0.0.2"], "localhost": ["127.0.0.1"]}
    monkeypatch.setattr(host_addresses, "_resolved", lambda name: known.get(name, [name]))
    connection: Any = Somewhere(name, own)
    assert with_address(Host("gpu"), connection, interface=None, alone=False).address == address
