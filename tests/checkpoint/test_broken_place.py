"""A place of checkpoints that fails entirely, as a dropped mount: training goes on, and the last state is kept."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from states import state

from stoker.checkpoint.dcp_store import Store
from stoker.checkpoint.memory_restore import steps_in_memory
from stoker.checkpoint.retention import Keep
from stoker.checkpoint.saver import Saver
from stoker.checkpoint.snapshots import Snapshots
from stoker.checkpoint.storage import BASE, LocalStorage
from stoker.errors import DiskFailed
from stoker.runs.kept_copies import is_kept
from stoker.runs.run_folder import RunFolder
from stoker.runs.shared_memory import shared_memory
from stoker.runs.shm_folder import shared_folder

TWO = Keep(2)


class EndpointConnectionError(Exception):
    """No OSError, as botocore's."""


EndpointConnectionError.__module__ = "botocore.exceptions"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    RunFolder(folder).event("started")
    return folder


def break_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))

    for name in ("steps", "begin", "room", "clean", "pending", "attempts_after", "give_up"):
        monkeypatch.setattr(LocalStorage, name, fail)


def break_store(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise EndpointConnectionError("Could not connect to the endpoint URL")

    for name in ("exists", "ls", "makedirs", "rm"):
        monkeypatch.setattr(MemoryFileSystem, name, fail)


@pytest.mark.parametrize(
    ("to", "broken", "why"),
    [("folder", break_folder, "not connected"), ("memory://place", break_store, "Could not connect to the endpoint")],
)
@pytest.mark.parametrize("background", [True, False])
def test_training_goes_on_and_the_last_state_is_kept(
    to: str, broken: Any, why: str, background: bool, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place: Path | str = to if "://" in to else run.parent / to
    events: list[tuple[str, dict[str, Any]]] = []

    def saver() -> Saver:
        record = lambda name, **values: events.append((name, values))  # noqa: E731
        return Saver(Store(place), Snapshots(run), background=background, event=record)

    kept = pytest.raises(DiskFailed, match=r"Step 3 is kept in this machine's memory")
    with kept, shared_memory(run), saver() as saving:
        saving.save(state(1), TWO)
        saving.report()
        with monkeypatch.context() as patch:
            broken(patch)
            saving.attempt(state(2), TWO)
            assert not saving.is_whole(1)
            saving.finish(state(3), TWO)
    assert [name for name, _ in events] == ["saved", "save_failed"]
    assert why in events[1][1]["error"] and "step 2 was not written" in events[1][1]["error"]

    with monkeypatch.context() as patch:  # the same command while the place is still broken keeps the state
        broken(patch)
        for start in (lambda one: one.store.clean(), lambda one: one.restore_newest(lambda _: state(0).held)):
            with pytest.raises(DiskFailed, match="cannot be used"), shared_memory(run), saver() as starting:
                start(starting)
            assert is_kept(run)
    with shared_memory(run), saver() as again:
        target = state(0)
        found = again.restore_newest(lambda _: target.held)
        assert found is not None and (found.step, found.where) == (3, "memory")
    fsspec.filesystem("memory").store.clear()


def test_a_last_state_that_adds_to_a_checkpoint_is_kept_whole(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that was kept is the only place with the last state: a part of it could not be gone on from."""

    def part(step: int) -> Any:
        return replace(state(step), numbers={**state(step).numbers, BASE: 1})

    kept = pytest.raises(DiskFailed, match=r"Step 3 is kept in this machine's memory")
    with kept, shared_memory(run), Saver(Store(run / "checkpoints"), Snapshots(run)) as saver:
        saver.save(state(1), TWO)
        monkeypatch.setattr(LocalStorage, "room", lambda _: 0)
        saver.finish(part(3), TWO, lambda: state(3))
    (found,) = steps_in_memory(shared_folder(run), None)
    assert found.step == 3
    with pytest.raises(RuntimeError), shared_memory(run):
        raise RuntimeError
    monkeypatch.undo()
    with shared_memory(run):
        pass


def test_a_part_of_a_state_is_not_said_to_be_kept(run: Path) -> None:
    with pytest.raises(DiskFailed) as caught, shared_memory(run) as folder:
        (folder.path / "rank-0").mkdir()
        (folder.path / "rank-0" / "slot-0.json").write_text('{"step": 3, "numbers": {"base": 2}}')
        raise DiskFailed("the disk is full")
    assert str(caught.value) == "the disk is full" and not is_kept(run)


def test_a_rollback_goes_on_from_memory(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[str] = []
    with shared_memory(run), Saver(Store(run / "checkpoints"), Snapshots(run), memory=1, note=notes.append) as saving:
        saving.save(state(1), TWO)
        saving.remember(state(2))
        target = state(0)
        with monkeypatch.context() as patch:
            break_folder(patch)
            found = saving.restore_newest(lambda _: target.held, before=3)
            assert found is not None and (found.step, found.where) == (2, "memory")
            assert "goes on from the copies in memory" in notes[0]
            with pytest.raises(DiskFailed, match="cannot be used"):  # older states are on the disk only
                saving.restore_newest(lambda _: target.held, before=2)
        found = saving.restore_newest(lambda _: target.held, before=2)
        assert found is not None and (found.step, found.where) == (1, "disk")


def test_checkpoints_that_a_rollback_could_not_delete_are_deleted_by_the_next_save(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with shared_memory(run), Saver(Store(run / "checkpoints"), Snapshots(run), memory=1) as saving:
        for step in (1, 4):
            saving.save(state(step), TWO)
        saving.remember(state(2))
        target = state(0)
        with monkeypatch.context() as patch:
            break_folder(patch)
            found = saving.restore_newest(lambda _: target.held, before=4)
        assert found is not None and (found.step, found.where) == (2, "memory") and saving.store.steps() == [1, 4]
        saving.save(state(3), TWO)
        assert saving.store.steps() == [1, 3]
