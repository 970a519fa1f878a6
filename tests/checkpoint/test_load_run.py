"""Checkpoints of a run that trains and deletes them while they are read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from states import state

from stoker.checkpoint import dcp_restore
from stoker.checkpoint.dcp_store import Store
from stoker.checkpoint.load_run import state_at
from stoker.checkpoint.retention import Keep
from stoker.errors import RunFailed, UserError
from stoker.job import load_job
from stoker.runs.run_folder import RunFolder


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """A run with a checkpoint of step 5."""
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    folder.write_job("task: sft\nmodel: m\ndata: x\n")
    Store(folder.checkpoints).save(state(5))
    return folder


def training(monkeypatch: pytest.MonkeyPatch, store: Store, more: int) -> Callable[[], int]:
    """The run saves the next checkpoint and deletes the one before, each time that one is opened; ``more`` times."""
    check, saved = dcp_restore.check_contents, 0

    def checked(*arguments: object) -> None:
        nonlocal saved
        if saved < more:
            saved += 1
            store.save(state(5 + saved))
            store.retain(Keep(1))
        check(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(dcp_restore, "check_contents", checked)
    return lambda: saved


def test_the_newest_is_read_when_the_run_deletes_one_meanwhile(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    training(monkeypatch, Store(folder.checkpoints), 2)
    found = state_at(folder, load_job(folder.job).job, "last", folder.path)
    assert found.step == 7 and found.numbers == state(7).numbers


def test_a_step_that_the_run_deletes_meanwhile_is_gone_and_not_damaged(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    training(monkeypatch, Store(folder.checkpoints), 1)
    with pytest.raises(UserError, match=r"has no checkpoint '5': write last, best, average, or one of 6"):
        state_at(folder, load_job(folder.job).job, "5", folder.path)


def test_a_run_that_deletes_each_checkpoint_before_it_is_read_is_said(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = training(monkeypatch, Store(folder.checkpoints), 100)
    with pytest.raises(RunFailed, match=r"run trains and deletes its checkpoints before they are read; stop it with"):
        state_at(folder, load_job(folder.job).job, "last", folder.path)
    assert count() == 5
