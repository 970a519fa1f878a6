"""Submissions over ssh that meet each other or are interrupted: one supervisor at most, and a record of what runs."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from stoker.cli.main import main
from stoker.cluster.claim import claimed, claimed_on_all
from stoker.cluster.record import find_record
from stoker.cluster.shell import LocalShell, ShellFailed, on_all
from stoker.cluster.ssh.start_script import state_script
from stoker.errors import UserError
from tiny_llama import save_tiny_llama
from tiny_tokenizer import tiny_tokenizer

SSH = 'case " $* " in *" -G "*) echo hostname 127.0.0.1;; *) eval "${@: -1}";; esac'  # the "host" is this machine
SETSID = f"""while read -r line; do kill -INT {os.getpid()}; sleep 0.3; done < interrupts
[ ! -e refuse ] || {{ echo "no process" >&2; exit 1; }}
exec /usr/bin/setsid "$@\""""


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a job and a target; a line of ``there/one/interrupts`` is a Ctrl-C while a supervisor starts."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    save_tiny_llama(tmp_path / "tiny", tiny_tokenizer())
    (tmp_path / "rows.jsonl").write_text('{"instruction": "a", "output": "b"}\n' * 4)
    binaries = tmp_path / "bin"
    binaries.mkdir()
    python = '[ "$1" = -c ] || exec sleep 60'
    for name, text in {"ssh": SSH, "setsid": SETSID, "python": python}.items():
        (binaries / name).write_text(f"#!/bin/bash\n{text}\n")
        (binaries / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{binaries}:/usr/bin:/bin")
    block = {"hosts": ["here"], "folder": str(tmp_path / "there"), "python": str(binaries / "python"), "code": False}
    job = {"task": "sft", "model": "tiny", "data": "rows.jsonl", "steps": 2, "output": "runs/one"}
    (tmp_path / "job.yaml").write_text(json.dumps({**job, "target": {"ssh": block}}))
    (tmp_path / "there/one").mkdir(parents=True)
    (tmp_path / "there/one/interrupts").touch()
    yield tmp_path
    if find_record("one") is not None:
        main(["stop", "one"])


def is_running(base: Path) -> bool:
    return LocalShell().run(state_script(str(base / "there/one"), "here")) == b"running\n"


def test_an_interrupt_while_a_run_starts_ends_it_and_leaves_no_record(
    base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (base / "there/one/interrupts").write_text("\n")
    assert main(["submit", "job.yaml"]) == 130
    said = capsys.readouterr().err
    assert said == (
        "interrupted: one is being started, and will be ended (Ctrl-C again leaves it running)\n"
        "nothing of one that this command started is running\n"
    )
    assert not is_running(base) and find_record("one") is None


def test_a_second_interrupt_leaves_a_record_that_stop_finds(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (base / "there/one/interrupts").write_text("\n\n")
    assert main(["submit", "job.yaml"]) == 130
    assert capsys.readouterr().err.endswith("one may be running: `stoker stop one` ends it\n")
    assert find_record("one") is not None


def test_a_failed_start_leaves_the_earlier_record(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["submit", "job.yaml"]) == 0
    assert is_running(base)
    assert main(["stop", "one"]) == 0
    before = find_record("one")
    (base / "there/one/refuse").touch()
    assert main(["submit", "job.yaml"]) == 1
    assert "error: here: no process\n" in capsys.readouterr().err
    assert find_record("one") == before and before is not None


def test_a_run_that_another_command_starts_is_refused(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with claimed(LocalShell(), str(base / "there/one"), "one"):
        assert main(["submit", "job.yaml"]) == 2
        refusal = "another command is submitting or resuming one (it holds .claim on here); wait for it"
        assert refusal in capsys.readouterr().err
    assert main(["submit", "job.yaml"]) == 0
    (base / "state/stoker/submitted/one.json").rename(base / "record")  # as another machine, which has no record
    assert main(["submit", "job.yaml"]) == 2
    (base / "record").rename(base / "state/stoker/submitted/one.json")
    assert main(["stop", "one"]) == 0
    with claimed(LocalShell(), str(base / "there/one"), "one"):
        assert main(["resume", "one"]) == 2
    assert "another command is submitting or resuming one" in capsys.readouterr().err
    assert main(["resume", "one"]) == 0


def test_stop_does_not_take_a_silent_host_for_a_stopped_one(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["submit", "job.yaml"]) == 0
    (base / "bin/ssh").rename(base / "bin/ssh-that-works")
    (base / "bin/ssh").write_text("#!/bin/sh\necho no route >&2; exit 255\n")
    (base / "bin/ssh").chmod(0o755)
    assert main(["stop", "one"]) == 1
    assert "one runs on none of the hosts that answer, and may be running on here" in capsys.readouterr().err
    (base / "bin/ssh-that-works").rename(base / "bin/ssh")


def test_a_claim_ends_with_the_process_that_holds_it(tmp_path: Path) -> None:
    home = str(tmp_path / "home")
    with pytest.raises(UserError), claimed(LocalShell(), home, "one"), claimed(LocalShell(), home, "one"):
        pass
    with claimed(LocalShell(), home, "one"):  # released, though its file is there
        assert (tmp_path / "home/.claim").exists()
    (tmp_path / "file").touch()
    with pytest.raises(ShellFailed, match=r"this machine: .*file"), claimed(LocalShell(), f"{tmp_path}/file/x", "one"):
        pass


class VerboseShell(LocalShell):
    """A shell that writes more to its standard error than a pipe holds."""

    def words(self, script: str) -> list[str]:
        return super().words(f"seq 100000 >&2; {script}")


@pytest.mark.timeout(30)
def test_a_claim_does_not_wait_for_a_reader_of_its_standard_error(tmp_path: Path) -> None:
    with claimed(VerboseShell(), str(tmp_path / "home"), "one"):
        assert (tmp_path / "home/.claim").exists()


@dataclass(frozen=True)
class Host:
    """A shell on this machine whose home is a folder of its own."""

    name: str
    home: Path

    def words(self, script: str) -> list[str]:
        return ["sh", "-c", f"cd {self.home} && {script}"]

    def run(self, script: str, **_: Any) -> bytes:
        return LocalShell().run(f"cd {self.home} && {script}")


def test_two_commands_with_a_common_host_do_not_both_hold_its_locks(tmp_path: Path) -> None:
    hosts = [Host(name, tmp_path / name) for name in ("a", "b", "c")]
    for host in hosts:
        host.home.mkdir()
    with claimed_on_all([hosts[1], hosts[0]], "one", "one"):
        for others in ([hosts[0]], [hosts[2], hosts[1]], hosts[:2]):
            refusal = "another command is submitting or resuming one"
            with pytest.raises(UserError, match=refusal), claimed_on_all(others, "one", "one"):
                pass
        with claimed_on_all([hosts[2]], "one", "one"):  # released by the command that was refused
            pass
    sharing = [Host(name, tmp_path / "a") for name in ("a", "b", "c")]
    with claimed_on_all(sharing, "one", "one"), pytest.raises(UserError), claimed_on_all(sharing[1:], "one", "one"):
        pass


def test_an_interrupt_ends_the_commands_of_all_hosts() -> None:
    def interrupt() -> None:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's jobs in the background ignore it
    try:
        threading.Thread(target=interrupt).start()
        begun = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            on_all([LocalShell()] * 3, lambda shell: shell.run("exec sleep 30"))
    finally:
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() - begun < 20
