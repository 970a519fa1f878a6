"""Checkpoints that add to another one: what they need stays, and none is taken for whole without it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from stoker.checkpoint.chunks import Chunk, Held
from stoker.checkpoint.dcp_store import Store
from stoker.checkpoint.disk_space import SPARE, make_room
from stoker.checkpoint.memory_restore import steps_in_memory
from stoker.checkpoint.retention import Keep
from stoker.checkpoint.saver import Saver
from stoker.checkpoint.shm_buffers import copies_in
from stoker.checkpoint.snapshots import Snapshots
from stoker.checkpoint.state import Saved, State
from stoker.checkpoint.storage import BASE, LocalStorage
from stoker.checkpoint.tensor_names import BASE_ROWS, ROWS
from stoker.runs.shared_memory import shared_memory
from stoker.runs.shm_folder import shared_folder


def state(step: int, base: int | None = None) -> State:
    """A weight, and a row of a table that is as old as its checkpoint."""
    tensors = {"model/a": torch.full((3,), float(step)), f"{ROWS}0/t/ids": torch.tensor([step])}
    return State(step, tensors, {} if base is None else {BASE: base})


def store_with(folder: Path, *bases: int | None) -> Store:
    """Checkpoints of steps 1, 2 ..., with their bases."""
    store = Store(folder)
    for step, base in enumerate(bases, start=1):
        store.save(state(step, base))
    return store


def test_the_rows_of_the_base_are_read_before_its_own(tmp_path: Path) -> None:
    store, order = store_with(tmp_path, None, 1, 1), []

    class Noted(Chunk):
        def filled(self) -> None:
            order.append(int(self.tensor[0]))

    def places(saved: dict[str, Saved]) -> Held:
        return {name: [Noted(torch.empty(e.shape, dtype=e.dtype), (0,), e.shape)] for name, e in saved.items()}

    numbers = store.restore(3, places)  # type: ignore[arg-type]
    assert order[0] == 1 and sorted(order) == [1, 3, 3] and numbers[BASE] == 1
    read = store.load(3).tensors
    assert read.keys() == {"model/a", f"{ROWS}0/t/ids", f"{BASE_ROWS}0/t/ids"}
    assert (int(read[f"{ROWS}0/t/ids"][0]), int(read[f"{BASE_ROWS}0/t/ids"][0])) == (3, 1)  # type: ignore[index]
    assert store.is_whole(1) and not store.is_whole(3)


def test_a_base_stays_as_long_as_what_adds_to_it_and_goes_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, deleted = store_with(tmp_path, None, 1, 1, None, 4, 4), []
    original = LocalStorage.delete

    def delete(self: LocalStorage, step: int) -> None:
        deleted.append(step)
        original(self, step)

    monkeypatch.setattr(LocalStorage, "delete", delete)
    store.retain(Keep(1, best=3))
    assert (store.steps(), deleted) == ([1, 3, 4, 6], [5, 2])
    store.retain(Keep(1))
    assert (store.steps(), deleted) == ([4, 6], [5, 2, 3, 1])
    store.forget_after(3)
    assert deleted[-2:] == [6, 4]


def test_room_is_made_without_bases_that_are_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = store_with(tmp_path, None, 1, None, 3, 3)
    storage, size = LocalStorage(tmp_path), sum(store.storage.sizes(2).values())
    monkeypatch.setattr(LocalStorage, "room", lambda _: SPARE)
    assert make_room(storage, 6, size // 2, Keep(5), replaces=False, base=3) == (2,)  # 1 was needed by 2
    assert make_room(storage, 6, size // 2, Keep(5), replaces=False, base=3) == (1,)
    assert make_room(storage, 6, size // 2, Keep(5), replaces=False, base=3) == (4,)
    with pytest.raises(OSError, match="No space left"):
        make_room(storage, 6, size // 2, Keep(5), replaces=True, base=5)
    assert store.steps() == [3, 5]


def test_an_increment_and_its_base_give_way_together_the_increment_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, deleted = store_with(tmp_path, None, 1, None), []
    storage, size = LocalStorage(tmp_path), sum(store.storage.sizes(2).values())
    monkeypatch.setattr(LocalStorage, "room", lambda _: SPARE)
    monkeypatch.setattr(LocalStorage, "delete", lambda _, step: deleted.append(step))
    assert make_room(storage, 4, size * 3 // 2, Keep(9), replaces=False) == (1, 2)
    assert deleted == [2, 1]


def test_the_newest_before_a_repeated_step_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = store_with(tmp_path, None, None, None)
    store.storage.delete(2)
    monkeypatch.setattr(LocalStorage, "room", lambda _: SPARE)
    with pytest.raises(OSError, match="No space left"):
        make_room(LocalStorage(tmp_path), 2, 10, Keep(9), replaces=False)
    assert store.steps() == [1, 3]


@pytest.mark.parametrize("harm", ["gone", "damaged"])
def test_one_whose_base_cannot_be_read_is_put_aside_for_an_older_one(harm: str, tmp_path: Path) -> None:
    store, events = store_with(tmp_path, None, None, 2), []
    if harm == "gone":
        store.storage.delete(2)
    else:
        file = next(store.storage.path(2).glob("*.distcp"))
        file.write_bytes(bytes(len(file.read_bytes())))
    saver = Saver(store, Snapshots(tmp_path), event=lambda name, **values: events.append((name, values["step"])))
    places: dict[str, torch.Tensor] = {}

    def into(saved: dict[str, Saved]) -> Held:
        places.update({name: torch.empty(e.shape, dtype=e.dtype) for name, e in saved.items()})
        return {name: [Chunk.whole(places[name])] for name in saved}

    restored = saver.restore_newest(into)  # type: ignore[arg-type]
    assert restored is not None and restored.step == 1 and places["model/a"][0] == 1
    assert {step for name, step in events if name == "damaged"} == ({3} if harm == "gone" else {2, 3})


def test_memory_is_never_taken_for_a_whole_state(tmp_path: Path) -> None:
    run = tmp_path
    with shared_memory(run):
        saver = Saver(Store(run / "checkpoints"), Snapshots(run), memory=1)
        with saver:
            saver.save_in_background(state(1), Keep(9))
            saver.save_in_background(state(2, 1), Keep(9))
            assert saver.is_whole(1) and not saver.is_whole(2) and not saver.is_whole(3)
            assert [copy.step for copy in steps_in_memory(shared_folder(run), None)] == [1]
            assert not saver.keep_in_memory(state(3, 1)) and saver.keep_in_memory(state(3))


def test_a_state_that_is_written_part_by_part_is_never_copied(tmp_path: Path) -> None:
    streamed = replace(state(2), streams=True)
    with (
        shared_memory(tmp_path) as shared,
        Saver(Store(tmp_path / "checkpoints"), Snapshots(tmp_path), memory=1) as saver,
    ):
        assert saver.cadence.due(1)
        saver.remember(streamed)
        assert not saver.cadence.due(2)
        assert not saver.keep_in_memory(streamed)
        saver.save_in_background(streamed, Keep(9))
        assert (saver.store.steps(), copies_in(shared.path)) == ([2], [])
