"""Slurm without Slurm: the script that is written, and what is made of what squeue, sacct and sbatch say."""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from submitting import submission_in, write_job

from stoker.cluster.chosen_target import ChosenTarget, choose_target
from stoker.cluster.record import save_record
from stoker.cluster.shell import LocalShell
from stoker.cluster.slurm.batch_script import batch_script
from stoker.cluster.slurm.block_problems import seconds_of
from stoker.cluster.slurm.job_state import JobState, job_state, reason_in_words
from stoker.cluster.slurm.slurm_target import SlurmTarget, open_target
from stoker.cluster.submission import submission_of
from stoker.cluster.submitted_run import target_of
from stoker.errors import UserError
from stoker.job import load_job


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
    ("requeue", "code", "stopped", "requeued"),
    [
        (10, 143, False, True),
        (1, 143, False, False),
        (10, 143, True, False),
        (10, 0, False, False),
        (10, 1, False, False),
    ],
)
def test_a_run_that_saved_in_time_goes_back_into_the_queue(
    fake: Path, monkeypatch: pytest.MonkeyPatch, requeue: int, code: int, stopped: bool, requeued: bool
) -> None:
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
    left = fake / ".stoker/job/exit-code"
    assert left.exists() is not requeued and (requeued or int(left.read_text()) == code)


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
    assert subprocess.run(["bash", "-c", script], check=False).returncode == code
    assert (fake / ".stoker/job/exit-code").read_text() == f"{code}\n"


@pytest.mark.parametrize(
    ("squeue", "sacct", "own", "state", "why"),
    [
        ("PENDING|0||(Resources)", None, None, "waiting", "it is next, and waits until enough nodes are free"),
        ("PENDING|0||ReqNodeNotAvail, UnavailableNodes:h3", None, None, "waiting",
         "nodes that it needs are down, drained or reserved (UnavailableNodes:h3)"),
        ("RUNNING|2|h[1-2]|None", None, None, "running", "started 3 times"),
        ("COMPLETED|0|h1|None", None, 0, "done", ""),
        ("FAILED|0|h1|NonZeroExitCode", None, 1, "failed", "ended with exit code 1"),
        ("FAILED|0|h1|NonZeroExitCode", None, 143, "stopped", "ended with exit code 143"),
        ("CANCELLED|0|h1|None", None, None, "stopped", "cancelled"),
        ("TIMEOUT|0|h1|TimeLimit", None, None, "failed", "it reached its time limit"),
        (None, "COMPLETED|0:0|h1|None", None, "done", ""),
        (None, "CANCELLED by 0|0:15|h1|None", None, "stopped", "cancelled"),
        (None, "OUT_OF_MEMORY|0:125|h1|OutOfMemory", None, "failed",
         "it used more memory than it had asked for: see `memory`"),
        (None, None, 0, "done", ""),
        (None, "OUT_OF_MEMORY|0:125|h1|OutOfMemory", 0, "done", ""),
        (None, None, 2, "failed", "ended with exit code 2"),
        (None, None, None, "lost", "Slurm no longer knows the job, and it has left no exit code"),
    ],
)  # fmt: skip
def test_states_with_and_without_accounting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, squeue: str | None, sacct: str | None, own: int | None, state: str,
    why: str,
) -> None:  # fmt: skip
    said = "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"
    if squeue is not None:
        one, two, three, four = squeue.split("|")
        said = f"echo '{one:<32}{two:<8}{three:<256}{four:<256}'"
    texts = {
        "squeue": said,
        "sacct": "echo 'Slurm accounting storage is disabled' >&2; exit 1" if sacct is None else f"echo '{sacct}'",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    status = job_state(LocalShell(), "7").status(own, None)
    assert (status.state, status.why) == (state, why)


def test_reasons_that_nobody_knows_are_shown_as_they_are() -> None:
    assert reason_in_words("(SomethingNew)") == "SomethingNew" and reason_in_words("(None)") == ""
    assert JobState("PENDING", "Priority").status(None, None).why.startswith("jobs with a higher priority")


def target_in(folder: Path, /, **keys: Any) -> tuple[SlurmTarget, ChosenTarget]:
    chosen = choose_target(load_job(write_job(folder, target={"slurm": keys})), None)
    return open_target(chosen), chosen


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"time": "5 hours"}, "`time: 5 hours` is not a time of Slurm"),
        ({"image": "x.sif"}, "`container` and `image` go together"),
        ({"container": "pyxis"}, "`container` and `image` go together"),
        *(({"sbatch": [text]}, "an array starts the job") for text in ("--array=1-3", "-a1-3", "-Ha 1-3", "--arr=1-3")),
        ({"sbatch": ["--nodes=4"]}, "Stoker writes --nodes itself; write `nodes:`"),
        ({"sbatch": ["-N4"]}, "Stoker writes --nodes itself; write `nodes:`"),
        ({"sbatch": ["--mail-type=END -N 4"]}, "Stoker writes --nodes itself; write `nodes:`"),
        ({"sbatch": ["-n8"]}, "Stoker writes --ntasks itself; write `devices:`"),
        ({"sbatch": ["--gres=gpu:1"]}, "Stoker writes --gres itself; write `gres:`"),
        ({"sbatch": ["--sign=USR1"]}, "Stoker writes --signal itself; write `warn:`, in seconds"),
        ({"sbatch": ["--no-requeue"]}, "Stoker writes --no-requeue itself; write `requeue: 0`"),
        ({"sbatch": ["-t", "1:00"]}, "Stoker writes --time itself; write `time:`"),
        ({"sbatch": ["-o/dev/null"]}, "Stoker writes --output itself"),
        ({"sbatch": ["-Jx"]}, "Stoker writes --job-name itself; use `--name`"),
        ({"sbatch": ["--chdir /tmp"]}, "Stoker writes --chdir itself"),
        ({"sbatch": ["-plong"], "partition": "gpu"}, "`partition` is given, from which Stoker writes --partition"),
        ({"sbatch": ["--mail-user='me"]}, "a quote that is not closed"),
        ({"partition": "gpu\n#SBATCH --array=1-3"}, "the value has several lines"),
        ({"sbatch": ["--mail-type=END\nrm x"]}, "the value has several lines"),
        ({"account": 'a"b'}, "a quote ends the value"),
        ({"setup": ["true\nNODE\nfalse"]}, "a line `NODE` would end the script"),
        ({"time": 2}, "`time: 2` is 120 s, and SIGTERM comes 180 s before its end"),
        ({"time": "0:03:00"}, "is 180 s, and SIGTERM comes 180 s"),
        ({"warn": 70000}, "Slurm takes at most 65535"),
        ({"mounts": ["/data"]}, "`mounts` are those of a container"),
        ({"ssh": {"IdentityFile": "x"}}, "there is no `login`"),
        ({"login": "me@host slots=4"}, "a login node, which needs no slots"),
        ({"login": "-oProxyCommand"}, "begins with a hyphen"),
        ({"login": "host", "ssh": {"a b": "c"}}, "`a b` is not the name of an option"),
        ({"memory": "10x"}, "`memory: 10x` is not a size of Slurm"),
        ({"gres": "gpu:0"}, "`gpu:0` has no device"),
        ({"gres": "gpu:"}, "`gpu:` is not a resource of Slurm"),
        ({"sbatch": ["mail-type=END"]}, "write `--mail-type=END`"),
    ],
)
def test_keys_that_are_refused(tmp_path: Path, keys: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError) as error:
        target_in(tmp_path, **keys)
    assert told in str(error.value) and error.value.problems[0].column


@pytest.mark.parametrize(
    "keys",
    [
        {"sbatch": ["--mail-type=END", "--mail-user me", "-v", "--time-min=10", "--mem-per-cpu=2G", "-plong"]},
        {"time": "0"},
        {"time": "1-0", "warn": 65535},
        {"memory": "0"},
        {"memory": "500G", "gres": "gpu:h100:8,nic:1"},
    ],
)
def test_keys_that_are_accepted(tmp_path: Path, keys: dict[str, Any]) -> None:
    target_in(tmp_path, **keys)


@pytest.mark.parametrize(
    ("time", "seconds"),
    [(5, 300), ("5", 300), ("5:30", 330), ("1:00:30", 3630), ("1-2", 93600), ("1-2:03", 93780), ("1-0:0:1", 86401)],
)
def test_times_are_read_as_sbatch_does(time: str | int, seconds: int) -> None:
    assert seconds_of(time) == seconds


def test_fewer_gpus_than_processes_are_refused(tmp_path: Path) -> None:
    loaded = load_job(write_job(tmp_path, parallel={"data": 4}, target={"slurm": {"gres": "gpu:h100:2,nic:1"}}))
    chosen = choose_target(loaded, None)
    with pytest.raises(UserError, match=r"job.yaml:1:\d+: `gres: gpu:h100:2,nic:1` has 2 GPUs, and each node runs 4"):
        open_target(chosen).preview(submission_of(loaded, chosen, tmp_path))


@pytest.mark.parametrize(
    ("partition", "refusal", "told", "code"),
    [
        ("gpus", "", "there is no partition gpus; write gpu", 2),
        ("gpu", "sbatch: error: Invalid account or account/partition combination specified",
         "Slurm refuses the job: Invalid account", 2),
        ("gpu", "allocation failure: Requested node configuration is not available", "Requested node configuration", 3),
    ],
)  # fmt: skip
def test_what_slurm_would_refuse_is_said_before_anything_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, partition: str, refusal: str, told: str, code: int
) -> None:
    binaries = tmp_path / "bin"
    binaries.mkdir()
    refuse = f"echo '{refusal}' >&2; exit 1"
    for name, text in {
        "sbatch": refuse,
        "sinfo": "echo gpu; echo cpu",
        "squeue": ":",
        "scancel": ":",
        "scontrol": ":",
    }.items():
        (binaries / name).write_text(f"#!/bin/sh\n{text}\n")
        (binaries / name).chmod(0o755)
    (binaries / "sh").symlink_to("/bin/sh")
    monkeypatch.setenv("PATH", str(binaries))  # a Slurm of this machine is not asked
    monkeypatch.chdir(tmp_path)
    target, chosen = target_in(tmp_path, partition=partition)
    submission = submission_of(load_job(tmp_path / "job.yaml"), chosen, tmp_path)
    with pytest.raises(UserError) as error:
        target.check(submission)
    assert told in str(error.value) and error.value.exit_code == code
    assert not (tmp_path / ".stoker").exists()
    (binaries / "sinfo").write_text("#!/bin/sh\necho 'slurm_load_partitions: Unable to contact' >&2; exit 1\n")
    with pytest.raises(UserError, match=r"Slurm does not answer: slurm_load_partitions: Unable to contact; `scontrol"):
        target.check(submission)
    (binaries / "squeue").unlink()
    with pytest.raises(UserError, match="there is no squeue here; write `login: me@host`"):
        target.check(submission)


def binaries_in(folder: Path, monkeypatch: pytest.MonkeyPatch, **texts: str) -> None:
    """Slurm's commands that succeed, and others; nothing else of this machine is found but a shell."""
    binaries = folder / "bin"
    binaries.mkdir()
    slurm = dict.fromkeys(("sbatch", "sinfo", "squeue", "scancel", "scontrol"), ":")
    for name, text in {**slurm, **texts}.items():
        (binaries / name).write_text(f"#!/bin/sh\n{text}\n")
        (binaries / name).chmod(0o755)
    (binaries / "sh").symlink_to("/bin/sh")
    monkeypatch.setenv("PATH", str(binaries))


@pytest.mark.parametrize(
    ("keys", "lacks", "told"),
    [
        ({}, "", ""),
        ({}, "torch", "Python is not checked: on this machine, python3 has no torch; the nodes"),
        ({"python": "{bin}/python3"}, "", ""),
        ({"python": "{bin}/python3"}, "torch", "job.yaml:1:"),
        ({"setup": ["touch ran"]}, "torch", "Python is not checked: `setup` runs on the nodes only; the nodes"),
        ({"python": "/local/python"}, "", "Python is not checked: on this machine, there is no /local/python;"),
        ({"container": "apptainer", "image": "i.sif"}, "torch", ""),
    ],
)
def test_the_python_is_checked_where_it_is_seen(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    keys: dict[str, Any],
    lacks: str,
    told: str,
) -> None:
    binaries_in(tmp_path, monkeypatch, python3=f"echo lacks: {lacks}")
    monkeypatch.chdir(tmp_path)
    written = {name: value.format(bin=tmp_path / "bin") if name == "python" else value for name, value in keys.items()}
    target, chosen = target_in(tmp_path, **written)
    submission = submission_of(load_job(tmp_path / "job.yaml"), chosen, tmp_path)
    if told.startswith("job.yaml"):
        with pytest.raises(UserError, match=r"job.yaml:1:\d+: this machine: .*/python3 has no torch; run there: "):
            target.check(submission)
    else:
        target.check(submission)
        said = capsys.readouterr().err
        assert said.startswith(told) and bool(said) == bool(told)
        assert not (tmp_path / "ran").exists()


def test_runs_of_a_target_are_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    base, elsewhere = tmp_path / "base", tmp_path / "elsewhere"
    jobs = {}
    for folder, name in ((base, "first"), (elsewhere, "second")):
        folder.mkdir()
        monkeypatch.chdir(folder)
        target, chosen = target_in(folder)
        submission = submission_of(load_job(folder / "job.yaml"), chosen, folder, name=name)
        handle = {"folder": f"{folder}/.stoker", "job": "1"}
        jobs[name] = submission.record("slurm", target={"login": None}, on="hpc", handle=handle)
        (folder / ".stoker" / name).mkdir(parents=True)
        (folder / ".stoker" / name / "submission.json").write_text(jobs[name].to_json())
    assert [found.name for found in target.records()] == ["second"]
    save_record(jobs["first"])
    assert [found.name for found in target.records()] == ["second", "first"]
    own = replace(jobs["first"], base="own")  # a run of the same name below the current folder is the one that is meant
    (elsewhere / ".stoker/first").mkdir()
    (elsewhere / ".stoker/first/submission.json").write_text(own.to_json())
    assert sorted((found.name, found.base) for found in target.records()) == [
        ("first", "own"),
        ("second", str(elsewhere)),
    ]


def test_a_run_is_resumed_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, elsewhere, binaries = tmp_path / "base", tmp_path / "elsewhere", tmp_path / "bin"
    for folder in (base, elsewhere, binaries):
        folder.mkdir()
    said = f'echo "$PWD $2" >> {tmp_path}/said; wc -l < {tmp_path}/said'
    for name, text in {
        "sbatch": said,
        "squeue": "echo 'Invalid job id specified' >&2; exit 1",
        "sacct": "exit 1",
    }.items():
        (binaries / name).write_text(f"#!/bin/sh\n{text}\n")
        (binaries / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{binaries}:/usr/bin:/bin")
    monkeypatch.chdir(base)
    target, chosen = target_in(base)
    record = target.submit(submission_of(load_job(base / "job.yaml"), chosen, base))
    assert record.handle["job"] == "1" and target.status(record).state == "lost"
    (base / ".stoker/job/exit-code").write_text("143\n")
    monkeypatch.chdir(elsewhere)
    again = target_of(record)
    assert again.status(record).state == "stopped"
    assert again.resume(record).handle["job"] == "2" and not (base / ".stoker/job/exit-code").exists()
    by_login, _ = target_in(elsewhere, login="login.example.org", folder=f"{base}/.stoker")  # as from another machine
    by_login._shell = LocalShell()
    (base / ".stoker/job/exit-code").write_text("143\n")
    assert [found.name for found in by_login.records()] == ["job"]
    assert by_login.resume(record).handle["job"] == "3"
    assert set((tmp_path / "said").read_text().splitlines()) == {f"{base} {base}/.stoker/job/submit.sbatch"}


def test_a_folder_of_the_home_is_named_in_full(tmp_path: Path) -> None:
    submission = submission_in(tmp_path, target={"slurm": {"folder": "~/jobs"}})
    target = open_target(choose_target(submission.loaded, None))
    assert f"--output={Path('~/jobs/job').expanduser()}/logs/" in target.preview(submission)


@pytest.mark.parametrize("login", [None, "login.example.org"])
@pytest.mark.parametrize("output", ["a run's", "/a run's"])
def test_logs_are_read_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, login: str | None, output: str
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    _, chosen = target_in(tmp_path, login=login)
    submission = submission_of(load_job(tmp_path / "job.yaml"), chosen, tmp_path)
    output = f"{tmp_path}{output}" if output.startswith("/") else output
    handle = {"folder": ".stoker", "job": "1", "requeue": None}
    record = replace(submission.record("slurm", target={"login": login}, on="", handle=handle), output=output)
    logs = (tmp_path / ".stoker/job" if login else tmp_path) / output / "logs"
    logs.mkdir(parents=True)
    (logs / "rank-0.log").write_text("a\n")
    for asked in (None, "login.example.org"):
        target, _ = target_in(tmp_path, login=asked)
        target._shell = LocalShell()
        assert list(target.logs(record, rank=0, follow=False)) == ["a"]
