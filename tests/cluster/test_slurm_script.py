"""The batch script for Slurm: its options, and what it does under bash with srun and scontrol replaced."""

from __future__ import annotations

import os
import re
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from submitting import submission_in

from stoker.cluster.chosen_target import choose_target
from stoker.cluster.slurm.batch_script import batch_script


def script_of(folder: Path, data: int = 4, **keys: Any) -> str:
    submission = submission_in(folder, parallel={"data": data}, target={"slurm": keys})
    chosen = choose_target(submission.loaded, None)
    return batch_script(submission, chosen.block, files=".stoker/job")  # type: ignore[arg-type]


def options(script: str) -> dict[str, str]:
    return dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(.*))?$", script, re.MULTILINE))


def test_every_key_has_its_option(tmp_path: Path) -> None:
    script = script_of(
        tmp_path, nodes=2, partition="gpu", account="me", qos="high", time="1-12", constraint="a100", reservation="r",
        cpus=16, memory="0", exclusive=True, nodelist="n[1-2]", exclude="n3", gres="gpu:h100", warn=60,
        sbatch=["--mail-type=END"],
    )  # fmt: skip
    assert options(script) == {
        "job-name": "job", "comment": options(script)["comment"], "nodes": "2", "ntasks-per-node": "1",
        "gres": "gpu:h100:2", "cpus-per-task": "16", "mem": "0", "partition": "gpu", "account": "me", "qos": "high",
        "reservation": "r", "constraint": "a100", "nodelist": "n[1-2]", "exclude": "n3", "time": "1-12",
        "output": ".stoker/job/logs/slurm-%j.log", "open-mode": "append", "signal": "B:TERM@60", "exclusive": "",
        "requeue": "", "mail-type": "END",
    }  # fmt: skip
    assert "--cpus-per-task=16" in script.split("srun", 1)[1]


def test_the_last_nodes_of_a_job_are_its_spares(fake: Path) -> None:
    (fake / "quick").write_text("0")
    script = script_of(fake, nodes=1, spares=1)
    assert options(script)["nodes"] == "2" and "no-kill" in options(script) and "--label" in script
    for number, spare in ((0, False), (1, True)):
        ran = subprocess.run(["bash", "-c", f"export SLURM_NODEID={number}\n{script}"], check=False)
        assert ran.returncode == 0
        words = (fake / "said").read_text().split()
        assert words[words.index("--nodes") + 1] == "1" and ("--spare" in words) == spare
        assert words[words.index("--rendezvous") + 1].count(",") == 1
    assert "spare" not in script_of(fake, nodes=2)


def test_a_job_that_can_lose_a_node_is_not_killed_with_it(tmp_path: Path) -> None:
    faults = {"nodes": {"min": 1, "max": 2}}
    submission = submission_in(tmp_path, parallel={"data": 2}, faults=faults, target={"slurm": {"nodes": 2}})
    script = batch_script(submission, choose_target(submission.loaded, None).block, files="f")  # type: ignore[arg-type]
    assert "no-kill" in options(script) and "--nodes 1:2 " in script
    assert any(line.startswith("srun") and " --no-kill " in line for line in script.splitlines())
    assert "no-kill" not in script_of(tmp_path, nodes=2)


def test_a_percent_sign_in_the_folder_is_no_pattern_of_slurms(tmp_path: Path) -> None:
    submission = submission_in(tmp_path, target={"slurm": {}})
    script = batch_script(submission, choose_target(submission.loaded, None).block, files="st%j/job")  # type: ignore[arg-type]
    assert options(script)["output"] == "st%%j/job/logs/slurm-%j.log"
    assert "STOKER_FILES=st%j/job" in script


@pytest.mark.parametrize(
    ("gres", "given"), [("gpu", "gpu:4"), ("gpu:2", "gpu:2"), ("gpu:h100:8,nic:1", "gpu:h100:8,nic:1"), ("none", None)]
)
def test_devices_of_a_node(tmp_path: Path, gres: str, given: str | None) -> None:
    assert options(script_of(tmp_path, gres=gres)).get("gres") == given


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({"container": "pyxis", "image": "a#b:1", "mounts": ["/data", "/x:/y"]}, "'--container-image=a#b:1'"),
        ({"container": "apptainer", "image": "my image.sif", "mounts": ["/data"]}, 'apptainer exec --pwd="$PWD"'),
    ],
)
def test_containers_are_around_the_supervisor_alone(tmp_path: Path, keys: dict[str, Any], line: str) -> None:
    script = script_of(tmp_path, **keys)
    srun = next(text for text in script.splitlines() if text.startswith("srun"))
    assert line in srun and srun.endswith("bash -s <<'NODE' &") and "/data:/data" in srun
    assert script.count(keys["image"]) == 1


@pytest.mark.parametrize("container", ["pyxis", "apptainer"])
@pytest.mark.parametrize("inside", [False, True])
def test_a_container_has_the_working_folder_and_the_files_that_are_sent(
    fake: Path, container: str, inside: bool
) -> None:
    """A folder elsewhere, named by a link, or the submission's own folder as the working folder, as with `login`."""
    (fake / "bin/srun").write_text('#!/bin/bash\nprintf "%s\\n" "$@" > "$SLURM_SUBMIT_DIR/srun"\n')
    shared = fake / "shared/jobs/job"
    shared.mkdir(parents=True)
    (shared / "environment.sh").touch()
    (fake / "link").symlink_to(fake / "shared")
    submission = submission_in(fake, target={"slurm": {"container": container, "image": "i.sif", "gres": "none"}})
    block = choose_target(submission.loaded, None).block
    script = batch_script(submission, block, files="." if inside else f"{fake}/link/jobs/job")  # type: ignore[arg-type]
    working = shared if inside else fake
    environment = {**os.environ, "SLURM_SUBMIT_DIR": str(working)}
    assert subprocess.run(["bash", "-c", script], env=environment, check=False).returncode == 0
    words = (working / "srun").read_text().splitlines()
    jobs = fake / "shared/jobs"
    if container == "pyxis":
        assert f"--container-mounts={working}:{working},{jobs}:{jobs}" in words
    else:
        assert words[words.index("exec") + 1 :][:3] == [f"--pwd={working}", f"--bind={working}", f"--bind={jobs}"]


@pytest.mark.parametrize(
    "keys", [{}, {"requeue": 0}, {"container": "pyxis", "image": "i"}, {"setup": ["module load x"]}]
)
def test_the_script_is_one_that_bash_takes(tmp_path: Path, keys: dict[str, Any]) -> None:
    script = script_of(tmp_path, **keys)
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    assert ("scontrol requeue" in script) is (keys.get("requeue") != 0)
    node = script.partition("<<'NODE' &\n")[2].partition("\nNODE\n")[0]
    subprocess.run(["bash", "-n"], input=node, text=True, check=True)
    assert keys.get("setup", [""])[0] in node


# sbatch, srun and the rest in the place of Slurm's: the script is run as Slurm would run it on one node.
FAKES = {
    "srun": 'shift $(($# - 2)); exec "$@"',
    "scontrol": '[ "$1" = requeue ] && echo requeued > requeued; [ "$1" = show ] && printf "h1\\nh2\\n"; :',
    "scancel": 'kill -TERM -- $(cat node-pid)',
    "python3": 'echo "$@" > said; [ -e quick ] && exit $(cat quick); '
    'trap "exit ${CODE:-143}" TERM; echo $$ > node-pid; while :; do sleep 0.05; done',
}  # fmt: skip


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    binaries = tmp_path / "bin"
    binaries.mkdir()
    for name, text in FAKES.items():
        (binaries / name).write_text(f"#!/bin/bash\n{text}\n")
        (binaries / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{binaries}:/usr/bin:/bin")
    for name, value in {
        "JOB_ID": "7",
        "SUBMIT_DIR": str(tmp_path),
        "JOB_NODELIST": "h[1-2]",
        "RESTART_COUNT": "1",
    }.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setenv("SLURMD_NODENAME", "h1")
    (tmp_path / ".stoker/job").mkdir(parents=True)
    (tmp_path / ".stoker/job/environment.sh").touch()
    return tmp_path


@pytest.mark.parametrize(
    ("requeue", "code", "stopped", "seconds", "requeued", "left"),
    [
        (10, 143, False, 0, True, None),
        (1, 143, False, 200, False, "143 time-limit"),
        (0, 143, False, 200, False, "143 time-limit"),
        (1, 143, False, 3000, False, "143"),  # someone else sent the signal
        (10, 143, True, 0, False, "143"),
        (10, 0, False, 0, False, "0"),
        (10, 1, False, 0, False, "1"),
    ],
)
def test_a_run_that_saved_in_time_goes_back_into_the_queue(
    fake: Path,
    monkeypatch: pytest.MonkeyPatch,
    requeue: int,
    code: int,
    stopped: bool,
    seconds: int,
    requeued: bool,
    left: str | None,
) -> None:
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + seconds))
    (fake / "script").write_text(script_of(fake, nodes=2, data=4, requeue=requeue))
    if stopped:
        (fake / ".stoker/job/stop").touch()
    monkeypatch.setenv("CODE", str(code))
    with subprocess.Popen(["bash", str(fake / "script")]) as job:
        while not (fake / "node-pid").exists() or not (fake / "node-pid").read_text():
            assert job.poll() is None
        job.terminate()
        assert job.wait(20) == (0 if requeued else code)
    assert (fake / "requeued").exists() is requeued
    ended = fake / ".stoker/job/exit-code"
    assert (ended.read_text().strip() if ended.exists() else None) == left


@pytest.mark.parametrize(
    ("end", "said", "left"),
    [
        (None, "date +%FT%T", "143 time-limit"),
        ("0", "date +%FT%T --date='3000 seconds'", "143"),
        (None, "echo N/A", "143"),
        ("0", "exit 1", "143"),
    ],
)
def test_the_end_of_a_job_is_asked_for_where_slurm_does_not_set_it(
    fake: Path, monkeypatch: pytest.MonkeyPatch, end: str | None, said: str, left: str
) -> None:
    monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)
    if end is not None:
        monkeypatch.setenv("SLURM_JOB_END_TIME", end)
    (fake / "bin/squeue").write_text(f"#!/bin/sh\n{said}\n")
    (fake / "bin/squeue").chmod(0o755)
    monkeypatch.setenv("CODE", "143")
    (fake / "script").write_text(script_of(fake, nodes=2, data=4, requeue=1))
    with subprocess.Popen(["bash", str(fake / "script")]) as job:
        while not (fake / "node-pid").exists() or not (fake / "node-pid").read_text():
            assert job.poll() is None
        job.terminate()
        assert job.wait(20) == 143
    assert (fake / ".stoker/job/exit-code").read_text().strip() == left


def test_a_run_that_was_saved_goes_back_although_a_node_was_killed(fake: Path) -> None:
    other = "echo 137 > .stoker/job/node-exit-code-h2; exit 137"
    (fake / "bin/srun").write_text(f'#!/bin/bash\nshift $(($# - 2)); "$@"; {other}\n')
    (fake / "script").write_text(script_of(fake, nodes=2, requeue=10))
    with subprocess.Popen(["bash", str(fake / "script")]) as job:
        while not (fake / "node-pid").exists() or not (fake / "node-pid").read_text():
            assert job.poll() is None
        job.terminate()
        assert job.wait(20) == 0
    assert (fake / "requeued").exists() and not (fake / ".stoker/job/exit-code").exists()


@pytest.mark.parametrize(("signal", "code"), [(False, 0), (True, 143)])
def test_a_run_that_has_ended_does_not_wait_for_a_lost_node(
    fake: Path, monkeypatch: pytest.MonkeyPatch, signal: bool, code: int
) -> None:
    monkeypatch.setattr("stoker.cluster.slurm.batch_script.LEFT", 0.1)
    (fake / "bin/srun").write_text('#!/bin/bash\nshift $(($# - 2)); "$@"; touch over; exec sleep 600\n')
    if not signal:
        (fake / "quick").write_text("0")
    (fake / "script").write_text(script_of(fake, nodes=2, requeue=0))
    with subprocess.Popen(["bash", str(fake / "script")], start_new_session=True) as job:
        if signal:
            while not (fake / "node-pid").exists() or not (fake / "node-pid").read_text():
                assert job.poll() is None
            job.terminate()
        try:
            assert job.wait(20) == code
        finally:
            with suppress(ProcessLookupError):
                os.killpg(job.pid, 9)
    assert (fake / "over").exists() and (fake / ".stoker/job/exit-code").read_text() == f"{code}\n"


def test_the_supervisors_meet_at_the_nodes_of_the_job(fake: Path) -> None:
    (fake / "quick").write_text("3")
    script = script_of(fake, nodes=2)
    port = re.findall(r"\$host:(\d+)", script)[0]
    assert subprocess.run(["bash", "-c", script], check=False).returncode == 3
    assert (fake / "said").read_text().split() == (
        f"-m stoker node .stoker/job/job.yaml --rendezvous h1:{port},h2:{port} --secret .stoker/job/secret "
        "--nodes 2 --devices 2 --name h1"
    ).split()
    assert (fake / ".stoker/job/exit-code").read_text() == "3\n"


@pytest.mark.parametrize(("codes", "code"), [((137, 0), 0), ((0, 0), 0), ((137, 1), 137)])
def test_a_run_that_some_nodes_have_finished_is_done(fake: Path, codes: tuple[int, int], code: int) -> None:
    each = "".join(f'SLURMD_NODENAME=h{n} CODE={c} bash -c "$script" & ' for n, c in enumerate(codes))
    (fake / "bin/srun").write_text(f"#!/bin/bash\nscript=$(cat); {each}wait; exit {max(codes)}\n")
    (fake / "bin/python3").write_text("#!/bin/bash\nexit $CODE\n")
    script = script_of(fake, nodes=2)
    (fake / ".stoker/job/node-exit-code-h7").write_text("0\n")  # of an earlier start
    done = subprocess.run(["bash", "-c", script], capture_output=True, check=False)
    assert done.returncode == code and b"Killed" not in done.stderr
    assert (fake / ".stoker/job/exit-code").read_text() == f"{code}\n"
