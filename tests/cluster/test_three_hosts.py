"""ssh and Slurm for real: three sshd, slurmctld and three slurmd on this machine; the same losses as without them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from lab import LONG, PATH, PAUSE, Lab, losses, missing

from stoker.cluster.claim import CLAIMED, claim_script, claimed
from stoker.cluster.send import send
from stoker.cluster.sent_files import CODE, SentFile, code_archive
from stoker.cluster.shell import ShellFailed
from stoker.cluster.ssh.connection import Connection, SshSettings
from stoker.errors import UserError

# Daemons, and runs of two supervisors each.
pytestmark = [
    pytest.mark.usefixtures("warm_processes"),
    pytest.mark.timeout(900),
    pytest.mark.slow,
    pytest.mark.pool,
    pytest.mark.skipif(bool(missing()), reason=missing()),
]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    made = Lab(tmp_path_factory.mktemp("lab"), tmp_path_factory.mktemp("base"))
    made.prepare()
    made.do("up")
    try:
        made.do("sshd")
        made.do("slurm")
        print(f"the hosts are {made.kind}")
        shared = made.kind == "loopback"
        made.target(
            "hosts",
            ssh={
                "hosts": ["h1 slots=2", "h2 slots=2", "h3 slots=2"], "nodes": 2, "python": sys.executable,
                "config": str(made.folder / "ssh_config"), "folder": str(made.folder / "own/st"), "shared": shared,
                "forward": ["OMP_NUM_THREADS"], "environment": {"PAUSE": str(PAUSE)},
            },
        )  # fmt: skip
        hpc = {"partition": "lab", "nodes": 2, "gres": "none", "python": made.python}
        made.target("hpc", slurm={**hpc, "environment": {"PAUSE": str(PAUSE)}})
        yield made
    finally:
        made.do("down")


@pytest.fixture(scope="module")
def whole(lab: Lab) -> list[float]:
    """The losses of the same job on this machine alone."""
    lab.stoker("train", "job.yaml", "output=runs/local")
    return losses(lab.base / "runs/local")


@pytest.fixture(scope="module")
def long(lab: Lab) -> list[float]:
    """Those of the long job, which nothing happened to."""
    lab.stoker("train", "long.yaml", "output=runs/long")
    return losses(lab.base / "runs/long")


def test_over_ssh_a_job_trains_as_here(lab: Lab, whole: list[float]) -> None:
    output = lab.folder / "ssh-run"
    first = json.loads(lab.stoker("submit", "job.yaml", "--on", "hosts", f"output={output}", "--json"))
    assert (first["nodes"] == 2 and first["handle"]["bytes_sent"] > 2 * first["bytes"] * 0.9) or lab.kind == "loopback"
    lines = lab.stoker("logs", "ssh-run", "-f").splitlines()
    assert {line.partition(" | ")[0] for line in lines} == {"h1", "h2", "rank 0", "rank 1"}
    assert lab.status("ssh-run")["status"]["state"] == "done"
    assert losses(output) == whole
    of_one = lab.stoker("logs", "ssh-run", "--rank", 1).splitlines()
    assert of_one and all(f"rank 1 | {line}" in lines for line in of_one)


def test_over_ssh_a_run_is_stopped_everywhere_and_goes_on(lab: Lab, long: list[float]) -> None:
    output = lab.folder / "ssh-long"
    lab.stoker("submit", "long.yaml", "--on", "hosts", f"output={output}")
    lab.until(lambda: (output / "metrics.jsonl").exists() and len(losses(output)) > 20)
    refused = lab.stoker("submit", "long.yaml", "--on", "hosts", f"output={output}", code=2)
    assert "ssh-long is already running on hosts" in refused
    said = lab.stoker("stop", "ssh-long")
    assert "ssh-long: stopped (h1 ended with exit code 143; h2 ended with exit code 143)" in said
    assert 20 < len(losses(output)) < LONG["steps"] and not _processes_of("ssh-long")
    lab.stoker("resume", "ssh-long")
    lab.until(lambda: lab.status("ssh-long")["status"]["state"] == "done")
    assert losses(output) == long


def test_a_host_that_is_not_there_is_named_before_anything_is_sent(lab: Lab) -> None:
    block = {"hosts": ["h1", "h2", "h4"], "config": str(lab.folder / "ssh_config"), "python": sys.executable}
    lab.target("absent", ssh={**block, "folder": str(lab.folder / "own/absent"), "connect": 3})
    said = lab.stoker("submit", "job.yaml", "--on", "absent", "parallel.data=3", "train.batch=6", code=2)
    assert "targets.yaml:1:" in said and "h4: cannot be reached: ssh: Could not resolve hostname h4" in said
    found = list(lab.folder.glob("own*/absent"))
    assert not found
    more = lab.stoker("submit", "job.yaml", "--on", "absent", "--exclude", "h4", "--dry-run")
    assert "h4" not in more and "--rendezvous" in more


def test_a_folder_that_the_hosts_do_not_share_is_refused_before_anything_is_sent(lab: Lab) -> None:
    if lab.kind == "loopback":
        pytest.skip("hosts of the loopback interface share all folders")
    said = lab.stoker("submit", "job.yaml", "--on", "hosts", "output=runs/apart", "--name", "apart", code=2)
    assert "runs/apart of h1 is not seen on h2" in said and "on storage that all nodes share" in said
    assert not [*lab.folder.glob("own*/st/apart"), *lab.folder.rglob(".stoker-*")]


def test_jump_hosts_and_names_that_nobody_knows(lab: Lab) -> None:
    settings = SshSettings(config=str(lab.folder / "ssh_config"), connect=3)
    through = Connection("h3", SshSettings(config=settings.config, jump="h1", connect=3))
    assert through.run("hostname -I").split() == Connection("h3", settings).run("hostname -I").split()
    with pytest.raises(ShellFailed, match="nowhere: cannot be reached: ssh: Could not resolve hostname nowhere"):
        Connection("nowhere", settings).run(":")


def test_files_that_a_host_has_are_not_sent_again(lab: Lab) -> None:
    connection = Connection("h3", SshSettings(config=str(lab.folder / "ssh_config")))
    folder = str(lab.folder / "own/tar")
    files = [code_archive(), SentFile.made("data/rows.jsonl", "{}\n")]
    assert send(connection, files, folder, "run") == sum(file.size for file in files)
    assert send(connection, files, folder, "run") == 0
    listed = connection.run(f"cd {folder}/run && cat data/rows.jsonl && ls {CODE}/stoker/cli/main.py")
    assert listed.decode() == f"{{}}\n{CODE}/stoker/cli/main.py\n"


def test_a_run_is_claimed_until_the_command_or_its_connection_ends(lab: Lab) -> None:
    connection = Connection("h3", SshSettings(config=str(lab.folder / "ssh_config")))
    home = str(lab.folder / "own/claimed")
    connection.run(f"mkdir -p {home}")
    held = subprocess.Popen(
        connection.words(claim_script(home, "other")), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert held.stdout is not None and held.stdout.readline().decode().strip() == CLAIMED
    with (
        pytest.raises(UserError, match="another command is submitting or resuming run"),
        claimed(connection, home, "run"),
    ):
        pass
    held.kill()  # as where its command is killed
    held.wait()

    def free() -> bool:
        try:
            with claimed(connection, home, "run"):
                return True
        except UserError:
            return False

    lab.until(free, 20)


@pytest.mark.exhaustive
def test_slurm_is_reached_through_a_login_node(lab: Lab, whole: list[float]) -> None:
    options = {"IdentityFile": str(lab.folder / "key"), "UserKnownHostsFile": str(lab.folder / "known_hosts")}
    options |= {"HostName": lab.address(1), "Port": lab.port, "SetEnv": f"SLURM_CONF={lab.folder / 'slurm.conf'}"}
    block = {
        "login": "h1",
        "ssh": options,
        "folder": str(lab.folder / "login"),
        "environment": {"OMP_NUM_THREADS": "1"},
    }
    lab.target("login", slurm={**block, "nodes": 2, "gres": "gpu", "python": lab.python})
    lab.stoker("submit", "job.yaml", "--on", "login", "--name", "by-login", "output=runs/by-login")
    assert lab.stoker("logs", "by-login", "-f").splitlines()
    assert lab.status("by-login")["status"]["state"] == "done"
    assert losses(lab.folder / "login/by-login/runs/by-login") == whole


def test_slurm_trains_a_job_as_here(lab: Lab, whole: list[float]) -> None:
    lab.stoker("submit", "job.yaml", "--on", "hpc", "output=runs/slurm")
    lines = lab.stoker("logs", "slurm", "-f").splitlines()
    assert {line.partition(" | ")[0] for line in lines} == {"slurm", "rank 0", "rank 1"}
    assert lab.status("slurm")["status"] == {"state": "done", "why": "", "nodes": ["h[1-2]"], "unreached": []}
    assert losses(lab.base / "runs/slurm") == whole
    assert (lab.base / ".stoker/slurm/secret").stat().st_mode & 0o077 == 0


@pytest.mark.exhaustive
def test_slurm_starts_a_run_again_that_had_to_make_room(lab: Lab, long: list[float]) -> None:
    output = lab.base / "runs/requeued"
    said = lab.stoker("submit", "long.yaml", "--on", "hpc", "output=runs/requeued", "--json")
    job = json.loads(said)["handle"]["job"]
    lab.until(lambda: (output / "metrics.jsonl").exists() and len(losses(output)) > 20)
    _slurm(lab, "scancel", "--batch", "--signal=TERM", job)  # what comes `warn` seconds before the end of the time
    # Slurm itself has no reason yet in the moment after a requeue.
    lab.until(lambda: "its begin time has not come" in lab.status("requeued")["status"]["why"], 60)
    assert lab.status("requeued")["status"]["state"] == "waiting"
    saved = len(losses(output))
    assert 20 < saved < LONG["steps"]
    _slurm(lab, "scontrol", "update", f"JobId={job}", "StartTime=now")  # Slurm waits two minutes otherwise
    lab.until(lambda: lab.status("requeued")["status"]["state"] == "done")
    assert losses(output) == long
    events = [json.loads(line) for line in (output / "events.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events if event["event"] == "resumed"] == [saved]


def test_slurm_says_why_a_job_waits_and_stop_ends_it(lab: Lab) -> None:
    lab.target("all", slurm={"partition": "lab", "nodes": 1, "gres": "none", "exclusive": True, "python": lab.python})
    job = ["submit", "long.yaml", "--on", "all", "parallel.data=1", "steps=100000"]
    # Another user's job has two of the three nodes.
    _slurm(lab, "sbatch", "--nodes=2", "--exclusive", "--output=/dev/null", "--job-name=other", "--wrap=sleep 600")
    lab.stoker(*job, "output=runs/first")
    lab.until(lambda: lab.status("first")["status"]["state"] == "running")
    lab.stoker(*job, "output=runs/second")
    why = {lab.status("second")["status"]["why"]}
    assert why <= {"it is next, and waits until enough nodes are free", "jobs with a higher priority are before it"}
    assert "second: stopped (cancelled)" in lab.stoker("stop", "second")
    lab.until((lab.base / "runs/first/metrics.jsonl").exists)
    said = lab.stoker("stop", "first")
    assert "first: stopped (ended with exit code 143)" in said
    listed = {run["name"]: run["status"]["state"] for run in json.loads(lab.stoker("runs", "--on", "all", "--json"))}
    assert listed["first"] == listed["second"] == "stopped"
    _slurm(lab, "scancel", "--name=other")


def _slurm(lab: Lab, *words: str) -> None:
    environment = {**os.environ, "PATH": PATH, "SLURM_CONF": str(lab.folder / "slurm.conf")}
    subprocess.run(words, env=environment, check=True)


def _processes_of(run: str) -> list[int]:
    """Processes of a run, on any host: a namespace hides none of them here."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cwd"):
        try:
            if path.readlink().name == run:
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def test_nothing_is_left_of_the_runs() -> None:
    left = [pid for run in ("ssh-run", "ssh-long") for pid in _processes_of(run)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left
