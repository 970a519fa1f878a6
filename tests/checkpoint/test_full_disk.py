"""A disk with room for few checkpoints: the older ones give way, and the last state is never lost."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from states import assert_saved, state

from stoker.checkpoint.dcp_store import Store
from stoker.checkpoint.disk_space import SPARE, make_room
from stoker.checkpoint.retention import Keep
from stoker.checkpoint.saver import Saver
from stoker.checkpoint.snapshots import Snapshots
from stoker.checkpoint.storage import LocalStorage
from stoker.errors import DiskFailed
from stoker.runs.kept_copies import is_kept
from stoker.runs.run_folder import RunFolder
from stoker.runs.shared_memory import shared_memory
from stoker.runs.shm_folder import shared_folder

TWO = Keep(2)
MIB = 1 << 20
Disk = Callable[[float], None]


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's folder."""
    run = tmp_path / "run"
    run.mkdir()
    RunFolder(run).event("started")
    return run


@pytest.fixture
def disk(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Disk:
    """Sets how many checkpoints of `state` the run's disk has room for; it says so, and writing beyond fails."""
    Store(tmp_path / "one").save(state(1))
    one = size_of(tmp_path / "one")
    room = [1 << 40]
    fsync = os.fsync

    def sync(descriptor: int) -> None:
        if size_of(run) > room[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(descriptor)

    monkeypatch.setattr(LocalStorage, "room", lambda _: room[0] - size_of(run))
    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr("stoker.checkpoint.disk_space.SPARE", one // 10)

    def holds(checkpoints: float) -> None:
        room[0] = int(checkpoints * one)

    return holds


def test_only_as_many_go_as_it_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path)
    for step in range(1, 6):
        store.save(state(step))
    storage, size = LocalStorage(tmp_path), sum(store.storage.sizes(1).values())
    monkeypatch.setattr(LocalStorage, "room", lambda _: SPARE)
    assert make_room(storage, 6, size // 2, Keep(5), replaces=False) == (1,)
    assert make_room(storage, 6, 2 * size, Keep(5, best=2), replaces=False) == (3, 4)
    for keep, replaces in ((Keep(2, best=2), False), (Keep(2, every=5, best=2), True)):
        with pytest.raises(OSError, match="No space left"):
            make_room(storage, 6, size, keep, replaces=replaces)
    assert make_room(storage, 5, size, Keep(2), replaces=False) == ()  # it is there
    assert store.steps() == [2, 5]
    assert make_room(storage, 6, size, Keep(2, best=2), replaces=True) == (5,)
    monkeypatch.setattr(LocalStorage, "room", lambda _: None)
    assert make_room(storage, 6, size, Keep(1), replaces=True) == ()
    assert make_room(storage, 6, size, Keep(1), replaces=True, was_full=True) == (2,)


@pytest.mark.parametrize("background", [True, False])
@pytest.mark.parametrize("room", [2.5, 1.5])
def test_older_checkpoints_give_way(room: float, background: bool, run: Path, disk: Disk) -> None:
    """With room for one only, that one goes when a copy of the next state is in memory that outlives the process."""
    with shared_memory(run), Saver(Store(run / "checkpoints"), Snapshots(run), background=background) as saver:
        disk(room)
        for step in range(1, 6):
            saver.save_in_background(state(step), TWO)
            saver.wait()
        outcomes = saver.finished()
        gone = [(1,), (2,), (3,), (4,)]
        assert [outcome.error for outcome in outcomes] == [None] * 5
        assert [outcome.deleted for outcome in outcomes] == ([(), (), *gone[:3]] if room > 2 else [(), *gone])
        assert saver.store.steps() == ([4, 5] if room > 2 else [5])
        for step in saver.store.steps():
            assert_saved(saver.store, step)


def test_the_only_checkpoint_stays_where_no_copy_outlives_the_process(run: Path, disk: Disk) -> None:
    with Saver(Store(run / "checkpoints"), Snapshots(run)) as saver:
        saver.save(state(1), TWO)
        disk(1.5)
        for save in (saver.save_in_background, saver.save):
            with pytest.raises(DiskFailed, match="the checkpoint of step 1 is whole"):
                save(state(2), TWO)
    assert_saved(saver.store, 1)


def test_under_a_quota_that_the_disk_does_not_tell_of_older_ones_give_way(
    run: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalStorage, "room", lambda _: None)
    with shared_memory(run), Saver(Store(run / "checkpoints"), Snapshots(run)) as saver:
        disk(2.5)
        for step in range(1, 6):
            saver.save(state(step), TWO)
        assert [outcome.deleted for outcome in saver.finished()] == [(), (), (1,), (2,), (3,)]
        assert saver.store.steps() == [4, 5]


def test_the_last_state_is_kept_in_memory_for_the_same_command(run: Path, disk: Disk) -> None:
    with pytest.raises(DiskFailed, match=r"step 7 was not written .* Step 7 is kept in this machine's memory \(/.*\)"):
        save_last(run, 7, lambda: disk(0.5))
    assert is_kept(run) and Store(run / "checkpoints").steps() == []
    with suppress(RuntimeError), shared_memory(run):  # the same command ends before it has saved
        raise RuntimeError
    assert is_kept(run)

    disk(1.5)  # somebody makes room
    with shared_memory(run), Saver(Store(run / "checkpoints"), Snapshots(run)) as saver:
        target = state(0)
        found = saver.restore_newest(lambda _: target.held)
        assert found is not None and (found.step, found.where) == (7, "memory")
        assert found.numbers == state(7).numbers
        saver.save(state(7), TWO)
    assert_saved(saver.store, 7)
    assert not shared_folder(run).exists()


def save_last(run: Path, step: int, before: Callable[[], None]) -> None:
    with shared_memory(run), Saver(Store(run / "checkpoints"), Snapshots(run)) as saver:
        before()
        try:
            saver.save(state(step), TWO)
        except DiskFailed:
            assert saver.keep_in_memory(state(step))
            raise


def test_a_state_of_which_the_disk_takes_a_part_is_no_checkpoint(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    attempt = storage.begin(3, os.getpid())
    assert attempt is not None
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, hard))
    try:
        with pytest.raises(OSError, match="too large"):
            storage.commit(attempt, bytes(2 * MIB))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert storage.steps() == []
