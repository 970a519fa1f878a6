"""Attempts at checkpoints: whose they are, which are left over, and what damaged ones become."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from states import assert_saved, state

from stoker.checkpoint import restore_newest, storage
from stoker.checkpoint.checksums import check_sizes
from stoker.checkpoint.dcp_store import Store
from stoker.checkpoint.storage import STATE, LocalStorage, attempt_name, is_alive, read_state, write_state
from stoker.checkpoint.writer import commit


def test_only_another_process_of_this_machine_is_known_to_write(monkeypatch: pytest.MonkeyPatch) -> None:
    attempt = attempt_name(1, os.getppid())
    assert is_alive(attempt)
    assert not is_alive(attempt_name(1, os.getpid()))  # this one knows what it writes
    assert not is_alive(attempt_name(1, 2**22 + 1)) and not is_alive("step-00000001")
    monkeypatch.setattr(time, "time_ns", lambda: 10**9)
    assert not is_alive(attempt_name(1, os.getppid()))  # the number belonged to an earlier process
    monkeypatch.setattr(storage, "_machine", lambda: "elsewhere")
    assert not is_alive(attempt)


def test_a_checkpoint_that_is_damaged_twice_is_put_aside_twice(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for _ in range(2):
        store.save(state(1))
        aside = store.put_aside(1)
        assert store.steps() == [] and Path(aside).is_dir()
    store.save(state(1))
    assert_saved(store, 1)


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_attempts_at_steps_that_the_run_repeats_are_given_up(scheme: str, tmp_path: Path) -> None:
    store = Store(f"{scheme}{tmp_path}" if scheme else tmp_path)
    store.save(state(1))
    attempts = [store.storage.begin(step, os.getppid()) for step in (2, 3, 4)]
    for attempt in attempts:
        assert attempt is not None
        with store.storage.create(attempt, "part") as file:
            file.write(b"x")
    store.forget_after(3)
    assert sorted(store.pending()) == [2, 3] and store.steps() == [1]
    store.forget_after(0)
    assert store.pending() == [] and store.steps() == []


def test_of_two_attempts_at_a_step_the_second_to_finish_is_given_up(tmp_path: Path) -> None:
    place = LocalStorage(tmp_path)
    attempts = [place.begin(3, os.getpid()) for _ in range(2)]
    sizes = [commit(place, str(attempt), step=3, parts=[], metadata=b"one", numbers={}) for attempt in attempts]
    assert sizes == [3, 0]
    assert place.steps() == [3] and len(list(tmp_path.iterdir())) == 1


def test_the_free_bytes_are_those_that_a_user_may_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system keeps some blocks for root."""
    found = SimpleNamespace(f_bavail=7, f_bfree=10, f_frsize=4096, f_bsize=1 << 20, f_blocks=100)
    monkeypatch.setattr(os, "statvfs", lambda _: found)
    assert LocalStorage(tmp_path / "not" / "yet").room() == 7 * 4096
    found.f_blocks = 0  # as some network file systems answer
    assert LocalStorage(tmp_path).room() is None


def test_a_checkpoint_is_on_the_disk_before_it_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a power failure, what is called a checkpoint is one."""
    done: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def syncs(descriptor: int) -> None:
        done.append(f"sync {Path(f'/proc/self/fd/{descriptor}').readlink().name.partition('step-')[0]}")
        fsync(descriptor)

    def renames(path: Path, target: Path) -> Path:
        done.append("rename")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", syncs)
    monkeypatch.setattr(Path, "rename", renames)
    place = LocalStorage(tmp_path / "place")
    attempt = place.begin(3, os.getpid())
    assert attempt is not None
    with place.create(attempt, "part") as file:
        file.write(b"x")
    place.commit(attempt, b"{}")
    assert done == ["sync part", f"sync {STATE}", "sync .partial-", "rename", "sync place"]


def test_a_checkpoint_that_is_half_deleted_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path)
    for step in (1, 2):
        store.save(state(step))
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda *_, **__: None)  # the process is killed before it
        store.storage.delete(2)
    assert store.steps() == [1] and len(list(tmp_path.iterdir())) == 2
    store.clean()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_a_state_without_a_checksum_is_one_from_before_checksums(tmp_path: Path) -> None:
    place = LocalStorage(tmp_path)
    place.path(3).mkdir()
    old = {"step": 3, "progress": {}, "scaler": {}, "files": {}}
    file = place.path(3) / STATE
    file.write_text(json.dumps(old))
    assert read_state(place, 3) == old
    changed = json.loads(write_state({**old, "base": 2}))
    del changed["sha256"]
    file.write_text(json.dumps(changed))
    with pytest.raises(ValueError, match="other contents"):
        read_state(place, 3)


def test_a_start_waits_for_a_writer_of_an_ended_process_that_may_have_a_newer_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restore_newest, "SETTLE", 0.3)
    store = Store(tmp_path)
    store.save(state(1))
    store.storage.begin(2, os.getppid())
    for newest, seconds in ((-1, 0.3), (2, 0.0)):  # a copy in memory of step 2 needs no checkpoint of it
        begun = time.monotonic()
        restore_newest._settle(store, newest)
        assert seconds <= time.monotonic() - begun < seconds + 0.25


def test_files_that_are_missing_or_of_another_size_or_checkpoint_are_damage(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    storage.path(3).mkdir()
    for name in ("a", "b", STATE):
        (storage.path(3) / name).write_bytes(b"1234")
    both = {"a": {"bytes": 4}, "b": {"bytes": 4}}
    check_sizes(storage, 3, both)
    for files, said in (
        ({**both, "c": {"bytes": 4}}, "c has 0 bytes, and 4"),
        ({"a": {"bytes": 4}}, "b has 4 bytes, and 0"),
        ({**both, "b": {"bytes": 5}}, "b has 4 bytes, and 5"),
    ):
        with pytest.raises(ValueError, match=said):
            check_sizes(storage, 3, files)
