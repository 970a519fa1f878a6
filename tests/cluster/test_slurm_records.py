"""Runs of a Slurm target, found by its records from any folder: runs, logs and resume."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
from submitting import slurm_target_in, submission_in, write_programs

from stoker.cluster.chosen_target import choose_target
from stoker.cluster.record import all_records, save_record
from stoker.cluster.shell import LocalShell
from stoker.cluster.slurm.slurm_target import open_target
from stoker.cluster.submission import submission_of
from stoker.cluster.submitted_run import target_of
from stoker.errors import RunFailed, UserError
from stoker.job import load_job


def test_runs_of_a_target_are_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    base, elsewhere = tmp_path / "base", tmp_path / "elsewhere"
    jobs = {}
    for folder, name in ((base, "first"), (elsewhere, "second")):
        folder.mkdir()
        monkeypatch.chdir(folder)
        target, chosen = slurm_target_in(folder)
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
    write_programs(
        binaries,
        {
            "sbatch": said,
            "squeue": "echo 'Invalid job id specified' >&2; exit 1",
            "sacct": "exit 1",
        },
    )
    monkeypatch.setenv("PATH", f"{binaries}:/usr/bin:/bin")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(base)
    target, chosen = slurm_target_in(base)
    record = target.submit(submission_of(load_job(base / "job.yaml"), chosen, base))
    assert record.handle["job"] == "1" and target.status(record).state == "lost"
    (base / ".stoker/job/exit-code").write_text("143\n")
    monkeypatch.chdir(elsewhere)
    again = target_of(record)
    assert again.status(record).state == "stopped"
    (base / ".stoker/job/exit-code").write_text("143 time-limit\n")
    why = "its time limit ended it, and `requeue` allows no further start; `stoker resume job` continues it"
    assert (again.status(record).state, again.status(record).why) == ("stopped", why)
    assert again.resume(record).handle["job"] == "2" and not (base / ".stoker/job/exit-code").exists()
    (binaries / "squeue").write_text(f"#!/bin/sh\necho '{'RUNNING':<32}'\n")
    with pytest.raises(UserError, match="job is running as job 2; no action is needed"):
        again.resume(record)  # whose job has ended: another command resumed it
    monkeypatch.chdir(base)
    with pytest.raises(UserError, match="job is already running as job 2; wait for it, `stoker stop job`"):
        target.submit(submission_of(load_job(base / "job.yaml"), chosen, base))
    monkeypatch.chdir(elsewhere)
    (binaries / "squeue").write_text("#!/bin/sh\necho 'Invalid job id specified' >&2; exit 1\n")
    # As from another machine.
    by_login, _ = slurm_target_in(
        elsewhere, login="login.example.org", folder=f"{base}/.stoker"
    )  # as from another machine
    by_login._shell = LocalShell()
    (base / ".stoker/job/exit-code").write_text("143\n")
    assert [found.name for found in by_login.records()] == ["job"]
    assert by_login.resume(record).handle["job"] == "3"
    assert set((tmp_path / "said").read_text().splitlines()) == {f"{base} {base}/.stoker/job/submit.sbatch"}


def test_a_run_that_stop_cancelled_stays_so_once_slurm_has_forgotten_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    binaries = tmp_path / "bin"
    binaries.mkdir()
    waiting = f"#!/bin/sh\ncase $* in *%S) echo 2026-12-01T08:00:00;; *) echo '{'PENDING':<32}';; esac\n"
    gone = "#!/bin/sh\necho 'Invalid job id specified' >&2; exit 1\n"
    write_programs(
        binaries, {"sbatch": "echo 1", "sacct": "exit 1", "squeue": "", "scancel": f"echo $* > {tmp_path}/said"}
    )
    monkeypatch.setenv("PATH", f"{binaries}:/usr/bin:/bin")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    target, chosen = slurm_target_in(tmp_path)
    (binaries / "squeue").write_text(gone)
    record = target.submit(submission_of(load_job(tmp_path / "job.yaml"), chosen, tmp_path))
    (binaries / "squeue").write_text(waiting)
    assert list(target.describe(record))[-1] == "may start    2026-12-01T08:00:00"
    target.stop(record)
    assert (tmp_path / "said").read_text() == "1\n" and target.status(record).state == "waiting"
    (binaries / "squeue").write_text(gone)
    assert (target.status(record).state, target.status(record).why) == ("stopped", "cancelled")


@pytest.mark.parametrize(
    ("ssh", "told"),
    [
        ("echo Welcome >&2; echo 'no route' >&2; exit 255", "login: cannot be reached: no route"),
        (None, "there is no ssh"),
    ],
)
def test_a_login_node_that_cannot_be_asked_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ssh: str | None, told: str
) -> None:
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path}/bin")
    if ssh is not None:
        (tmp_path / "bin/ssh").write_text(f"#!/bin/sh\n{ssh}\n")
        (tmp_path / "bin/ssh").chmod(0o755)
    target, chosen = slurm_target_in(tmp_path, login="login")
    record = submission_of(load_job(tmp_path / "job.yaml"), chosen, tmp_path).record(
        "slurm", target={}, on="", handle={}
    )
    with pytest.raises(RunFailed, match=told):
        target.resume(replace(record, handle={"folder": ".stoker", "job": "1"}))


def test_a_run_that_another_kind_of_target_had_is_no_job_of_slurm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sbatch").write_text("#!/bin/sh\necho 7\n")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    target, chosen = slurm_target_in(tmp_path)
    submission = submission_of(load_job(tmp_path / "job.yaml"), chosen, tmp_path)
    (tmp_path / ".stoker/job").mkdir(parents=True)
    other = submission.record("ssh", target={}, on="", handle={})
    (tmp_path / ".stoker/job/submission.json").write_text(other.to_json())
    assert target.submit(submission).handle["job"] == "7"


@pytest.mark.parametrize(
    ("submitted", "cancelled"),
    [(f"kill -INT {os.getpid()}; echo 7", True), ("exit 1", False)],
    ids=["interrupted", "failed"],  # each process that collects tests has another id
)
def test_nothing_is_left_of_an_interrupted_or_failed_submission(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, submitted: str, cancelled: bool
) -> None:
    binaries = tmp_path / "bin"
    binaries.mkdir()
    write_programs(binaries, {"sbatch": submitted, "scancel": f'echo "$1" > {tmp_path}/cancelled'})
    monkeypatch.setenv("PATH", f"{binaries}:/usr/bin:/bin")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    target, chosen = slurm_target_in(tmp_path)
    with pytest.raises(KeyboardInterrupt if cancelled else RunFailed):
        target.submit(submission_of(load_job(tmp_path / "job.yaml"), chosen, tmp_path))
    assert not all_records() and (tmp_path / "cancelled").exists() is cancelled
    assert not cancelled or (tmp_path / "cancelled").read_text() == "7\n"


def test_a_second_interrupt_leaves_a_record_by_which_stop_finds_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    binaries = tmp_path / "bin"
    binaries.mkdir()
    interrupt = f"kill -INT {os.getpid()}; sleep 0.3"
    write_programs(
        binaries,
        {
            "sbatch": f"{interrupt}; {interrupt}; while [ ! -e {tmp_path}/go ]; do sleep 0.05; done; echo 7",
            "squeue": f'echo "$*" >> {tmp_path}/asked; echo PENDING',
            "scancel": f'echo "$1" > {tmp_path}/cancelled',
        },
    )
    monkeypatch.setenv("PATH", f"{binaries}:/usr/bin:/bin")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    target, chosen = slurm_target_in(tmp_path)
    submission = submission_of(load_job(tmp_path / "job.yaml"), chosen, tmp_path)
    with pytest.raises(KeyboardInterrupt):
        target.submit(submission)
    assert capsys.readouterr().err.endswith("job may be queued: `stoker stop job` cancels it\n")
    (record,) = all_records()
    assert target.status(record).state == "lost" and not (tmp_path / "asked").exists()  # sbatch still runs
    with pytest.raises(RunFailed, match="sbatch has given no number for job"):
        target.stop(record)
    (tmp_path / "go").touch()
    while (tmp_path / ".stoker/job/job-number").read_text() != "7\n":
        time.sleep(0.05)
    assert target.status(record).state == "waiting" and "--jobs=7 " in (tmp_path / "asked").read_text()
    assert [next(iter(target.describe(found))) for found in target.records()] == ["job          7"]
    for again in (lambda: target.submit(submission), lambda: target.resume(record)):
        with pytest.raises(UserError, match=r"job is (already )?waiting as job 7"):
            again()
    target.stop(record)
    assert (tmp_path / "cancelled").read_text() == "7\n"


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
    _, chosen = slurm_target_in(tmp_path, login=login)
    submission = submission_of(load_job(tmp_path / "job.yaml"), chosen, tmp_path)
    output = f"{tmp_path}{output}" if output.startswith("/") else output
    handle = {"folder": ".stoker", "job": "1", "requeue": None}
    record = replace(submission.record("slurm", target={"login": login}, on="", handle=handle), output=output)
    logs = (tmp_path / ".stoker/job" if login else tmp_path) / output / "logs"
    logs.mkdir(parents=True)
    (logs / "rank-0.log").write_text("a\n")
    for asked in (None, "login.example.org"):
        target, _ = slurm_target_in(tmp_path, login=asked)
        target._shell = LocalShell()
        assert list(target.logs(record, rank=0, follow=False)) == ["a"]
