"""Checkpoints at ``checkpoint.to``: of one run only, which can be moved; ``--fresh`` sets them aside with their run."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from running import assert_same_state, run, stop_at

from stoker.checkpoint.dcp_store import State, Store
from stoker.checkpoint.load_run import checkpoint_step
from stoker.checkpoint.owner import check_owner, claim_place
from stoker.checkpoint.storage import storage_of
from stoker.cli.main import main
from stoker.cli.train.start_over import is_restart, put_run_aside, start_fresh
from stoker.errors import UserError
from stoker.job import load_job
from stoker.runs.run_folder import RunFolder


def test_another_run_is_refused_and_nothing_is_touched(base: Path, sft: dict[str, Any]) -> None:
    ran = run(base, sft, "checkpoint.to=shared", before=stop_at(8))
    left = base / "shared" / ".partial-step-00000009-host.1.1"  # of a writer on another machine
    left.mkdir()
    for _ in range(2):
        with pytest.raises(UserError, match=r"has the checkpoints of another run, .*/run on .*place of its own"):
            run(base, sft, "checkpoint.to=shared", "output=other", "train.lr=0.5")
        assert left.is_dir() and ran.store.steps()[-1] == 3
    (base / "run").rename(base / "moved")
    assert run(base, sft, "checkpoint.to=shared", "output=moved").outcome.state == "done"
    assert not left.exists()


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_of_two_runs_that_begin_together_one_gets_the_place(
    scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    place = f"{scheme}{tmp_path / 'shared'}" if scheme else tmp_path / "shared"
    one, other = RunFolder(tmp_path / "one"), RunFolder(tmp_path / "other")
    for folder in (one, other):
        folder.path.mkdir()
        folder.event("started", run=folder.path.name)
        check_owner(storage_of(place), folder)
    claim_place(storage_of(place), one)
    with pytest.raises(UserError, match="another run"):
        claim_place(storage_of(place), other)
    with pytest.raises(FileExistsError):
        storage_of(place).claim(b"{}", replaces=False)
    claim_place(storage_of(place), one)
    moved = RunFolder(one.path.rename(tmp_path / "moved"))
    with monkeypatch.context() as patch:  # a full disk does not end a run that has moved
        patch.setattr(type(storage_of(place)), "claim", full)
        claim_place(storage_of(place), moved)
    one = RunFolder(moved.path.rename(tmp_path / "one"))
    one.events.unlink()
    one.event("started", run="again")  # its folder was removed by hand: no one else can train in it
    claim_place(storage_of(place), one)
    check_owner(storage_of(place), one)


@pytest.mark.parametrize("to", ["there", "file://{base}/there"])
@pytest.mark.usefixtures("warm_processes")
def test_fresh_sets_run_and_checkpoints_aside(
    to: str, base: Path, sft: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(base)
    to = to.format(base=base)
    job = {**sft, "steps": 2, "checkpoint": {"to": to}, "faults": {"restarts": 0}}
    Path("job.yaml").write_text(yaml.safe_dump(job))
    for number in (1, 2):
        assert main(["train", "job.yaml", "--json", "--fresh"]) == 0
        if number == 1:
            assert [path.name for path in (base / "there").glob("*step*")]
            first = checkpoint_step(RunFolder(base / "run"), load_job(base / "run" / "job.yaml").job, "last", base)
            before = first[0].load(2)
    assert f"its checkpoints are now in {to}/run.1" in capsys.readouterr().err
    old = RunFolder(base / "run.1")
    store, step = checkpoint_step(old, load_job(old.job).job, "last", base)
    assert step == 2
    assert_same_state(store.load(step), before)
    assert (base / "there" / "run.1" / "run.json").is_file() and (base / "there" / "run.json").is_file()

    shutil.rmtree("run")  # the checkpoints are left
    assert main(["train", "job.yaml", "--json"]) == 2
    assert "job.yaml is not" in capsys.readouterr().err
    assert main(["train", "job.yaml", "--json", "--fresh"]) == 0
    assert main(["train", "job.yaml", "--json", "--fresh", "output=other"]) == 2  # those of another run
    assert "another run" in capsys.readouterr().err and not Path("other").exists()


def test_a_run_that_was_moved_keeps_its_place_where_another_begins_in_its_old_folder(tmp_path: Path) -> None:
    storage, one = storage_of(tmp_path / "place"), RunFolder(tmp_path / "one")
    one.path.mkdir()
    one.event("started", run="one")
    claim_place(storage, one)
    moved = RunFolder(one.path.rename(tmp_path / "moved"))
    claim_place(storage, moved)
    one.path.mkdir()
    with pytest.raises(UserError, match=r"of another run, .*/moved on"):
        check_owner(storage, one)
    check_owner(storage, moved)


def test_a_run_in_a_folder_of_the_same_name_on_another_machine_is_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage, run = storage_of(tmp_path / "place"), RunFolder(tmp_path / "run")
    run.path.mkdir()
    run.event("started", run="one")
    with monkeypatch.context() as patch:
        patch.setattr("socket.gethostname", lambda: "elsewhere")
        claim_place(storage, run)
    run.events.unlink()
    run.event("started", run="two")
    with pytest.raises(UserError, match=r"another run, .*/run on elsewhere"):
        check_owner(storage, run)


def test_of_two_runs_that_both_saw_no_owner_one_gets_the_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = storage_of(tmp_path / "place")
    one, other = RunFolder(tmp_path / "one"), RunFolder(tmp_path / "other")
    for folder in (one, other):
        folder.path.mkdir()
        folder.event("started", run=folder.path.name)
    claim_place(storage, one)
    owner = type(storage).owner
    seen = iter([None])  # the other has looked before
    monkeypatch.setattr(type(storage), "owner", lambda self: next(seen, owner(self)))
    with pytest.raises(UserError, match=r"another run, .*/one"):
        claim_place(storage, other)
    check_owner(storage, one)


def test_fresh_leaves_checkpoints_that_no_record_names(tmp_path: Path) -> None:
    store = Store(tmp_path / "place")
    store.save(State(1, {"model/a": torch.zeros(2)}, {"progress": {}}))
    with pytest.raises(UserError, match=r"nothing tells whether they are those of .*/other"):
        put_run_aside(tmp_path / "other", "place", tmp_path)
    assert store.steps() == [1]
    mine = RunFolder(tmp_path / "mine")
    mine.path.mkdir()
    mine.write_job("task: sft\nmodel: m\ndata: x\ncheckpoint: {to: place}\n")
    mine.event("started")
    put_run_aside(mine.path, "place", tmp_path)
    assert store.steps() == [] and Store(tmp_path / "place" / "mine.1").steps() == [1]


def test_the_restart_of_a_launcher_resumes_what_its_command_began(
    base: Path, sft: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = base / "run"
    assert not is_restart(folder, {}) and not is_restart(folder, {"TORCHELASTIC_RESTART_COUNT": "0"})
    assert is_restart(folder, {"TORCHELASTIC_RESTART_COUNT": "1"})
    requeued = {"SLURM_RESTART_COUNT": "2", "SLURM_JOB_ID": "17"}
    assert not is_restart(folder, requeued)
    for name, value in requeued.items():
        monkeypatch.setenv(name, value)
    run(base, sft, "steps=1")
    assert is_restart(folder, requeued) and not is_restart(folder, {**requeued, "SLURM_JOB_ID": "18"})
    start_fresh(folder, None, base)
    assert folder.is_dir() and "--fresh has no effect in a launcher's restart" in capsys.readouterr().err
    monkeypatch.setenv("SLURM_JOB_ID", "18")
    start_fresh(folder, None, base)
    assert not folder.exists()
