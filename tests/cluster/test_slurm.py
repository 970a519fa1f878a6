"""Slurm targets with replaced commands: states and reasons of jobs, refused keys, and the check of the Python."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from submitting import slurm_target_in, write_job, write_programs

from stoker.cluster.chosen_target import choose_target
from stoker.cluster.shell import LocalShell
from stoker.cluster.slurm.block_problems import seconds_of
from stoker.cluster.slurm.job_state import JobState, job_state, reason_in_words
from stoker.cluster.slurm.slurm_target import open_target
from stoker.cluster.submission import submission_of
from stoker.errors import RunFailed, UserError
from stoker.job import load_job


@pytest.mark.parametrize(
    ("squeue", "sacct", "own", "state", "why"),
    [
        ("PENDING|0||(Resources)", None, None, "waiting", "it is next, and waits until enough nodes are free"),
        ("PENDING|0||ReqNodeNotAvail, UnavailableNodes:h3", None, None, "waiting",
         "nodes that it needs are down, drained or reserved (UnavailableNodes:h3)"),
        ("RUNNING|2|h[1-2]|None", None, None, "running", "started 3 times"),
        ("COMPLETED|0|h1|None", None, 0, "done", ""),
        ("COMPLETING|0|h1|None", None, None, "running", ""),
        ("COMPLETING|0|h1|None", None, 0, "done", ""),
        ("COMPLETING|0|h1|None", None, 143, "stopped", "ended with exit code 143"),
        ("RUNNING|0|h1|None", None, 0, "running", ""),
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
        slurm_target_in(tmp_path, **keys)
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
    slurm_target_in(tmp_path, **keys)


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
    write_programs(
        binaries,
        {
            "sbatch": refuse,
            "sinfo": "echo gpu; echo cpu",
            "squeue": ":",
            "scancel": ":",
            "scontrol": ":",
        },
    )
    (binaries / "sh").symlink_to("/bin/sh")
    monkeypatch.setenv("PATH", str(binaries))  # a Slurm of this machine is not asked
    monkeypatch.chdir(tmp_path)
    target, chosen = slurm_target_in(tmp_path, partition=partition)
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
    (binaries / "sh").unlink()
    with pytest.raises(RunFailed, match=r"^this machine: there is no sh here$"):
        target.check(submission)


def binaries_in(folder: Path, monkeypatch: pytest.MonkeyPatch, **texts: str) -> None:
    """Slurm's commands that succeed, and others; nothing else of this machine is found but a shell."""
    binaries = folder / "bin"
    binaries.mkdir()
    slurm = dict.fromkeys(("sbatch", "sinfo", "squeue", "scancel", "scontrol"), ":")
    write_programs(binaries, {**slurm, **texts})
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
    target, chosen = slurm_target_in(tmp_path, **written)
    submission = submission_of(load_job(tmp_path / "job.yaml"), chosen, tmp_path)
    if told.startswith("job.yaml"):
        with pytest.raises(UserError, match=r"job.yaml:1:\d+: this machine: .*/python3 has no torch; run there: "):
            target.check(submission)
    else:
        target.check(submission)
        said = capsys.readouterr().err
        assert said.startswith(told) and bool(said) == bool(told)
        assert not (tmp_path / "ran").exists()
