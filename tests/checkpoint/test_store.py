"""Checkpoints: whole or not there, kept as asked for, and found out when the disk has damaged them."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from stoker.checkpoint.store import DamagedError, State, Store
from stoker.errors import RunFailed


def state(step: int) -> State:
    generator = torch.Generator().manual_seed(step)
    tensors = {
        "model/a": torch.randn(40, 30, generator=generator),
        "model/b": torch.randn(7, generator=generator).to(torch.bfloat16),
        "optimizer/a/step": torch.tensor(float(step)),
        "buffer/n": torch.tensor(step),
        "model/empty": torch.zeros(0, 3),
    }
    return State(step, tensors, {"progress": {"samples": 8 * step, "best_loss": 0.1 + step}, "scaler": {}})


def visible(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_is_saved_is_loaded_to_the_bit(tmp_path: Path) -> None:
    store = Store(tmp_path / "deep" / "checkpoints")
    assert store.steps() == []
    assert store.save(state(3)) > 0
    assert store.save(state(3)) == 0.0  # it is there already
    loaded, saved = store.load(3), state(3)
    assert loaded.step == 3 and loaded.numbers == saved.numbers
    assert loaded.tensors.keys() == saved.tensors.keys()
    for name, tensor in saved.tensors.items():
        assert loaded.tensors[name].dtype == tensor.dtype and torch.equal(loaded.tensors[name], tensor)


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for step in (5, 10, 15, 20):
        store.save(state(step))
    store.retain(2, 5)
    assert store.steps() == [5, 15, 20]
    store.retain(1, None)
    assert store.steps() == [20] and visible(tmp_path) == ["step-00000020"]


def test_cleaning_removes_what_was_left_behind_and_nothing_else(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.clean()
    store.save(state(1))
    for name in (".partial-step-00000002-77", ".doomed-step-00000001-77", ".git-things", "step-notes"):
        (tmp_path / name).mkdir()
    assert store.steps() == [1]
    store.clean()
    assert visible(tmp_path) == [".git-things", "step-00000001", "step-notes"]


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (errno.ENOSPC, "the disk is full"),
        (errno.EACCES, "the disk cannot be written"),
        (errno.EDQUOT, "full"),
    ],
)
def test_a_failed_write_leaves_the_earlier_checkpoint_and_nothing_partial(
    code: int, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path)
    store.save(state(1))

    def fail(descriptor: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(RunFailed, match=words) as caught:
        store.save(state(2))
    monkeypatch.undo()

    assert "step 1 is whole" in str(caught.value) and "go on" in str(caught.value)
    assert visible(tmp_path) == ["step-00000001"]
    assert torch.equal(store.load(1).tensors["model/a"], state(1).tensors["model/a"])
    assert store.save(state(2)) > 0


def test_the_first_write_that_fails_says_that_there_is_no_other(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFailed, match="no checkpoint had been written before"):
        Store(tmp_path / "file" / "checkpoints").save(state(1))


def test_a_bug_is_no_full_disk(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        Store(tmp_path).save(State(1, {}, {"progress": object()}))
    assert visible(tmp_path) == []


def test_an_interrupted_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(dcp, "save", interrupt)
    with pytest.raises(KeyboardInterrupt):
        Store(tmp_path).save(state(1))
    assert visible(tmp_path) == []


def cut(path: Path) -> None:
    (file,) = path.glob("*.distcp")
    file.write_bytes(file.read_bytes()[:-100])


def lose_tensors(path: Path) -> None:
    (file,) = path.glob("*.distcp")
    file.unlink()


def lose_numbers(path: Path) -> None:
    (path / "state.json").unlink()


def garble_numbers(path: Path) -> None:
    (path / "state.json").write_text("{")


def lose_metadata(path: Path) -> None:
    (path / ".metadata").unlink()


def garble_metadata(path: Path) -> None:
    size = (path / ".metadata").stat().st_size
    (path / ".metadata").write_bytes(b"\x00" * size)


@pytest.mark.parametrize("damage", [cut, lose_tensors, lose_numbers, garble_numbers, lose_metadata, garble_metadata])
def test_damage_is_found_and_put_aside(damage: object, tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.save(state(1))
    store.save(state(2))
    assert callable(damage)
    damage(store.path(2))
    with pytest.raises(DamagedError, match="step-00000002 is damaged"):
        store.load(2)
    store.put_aside(2)
    assert store.steps() == [1] and visible(tmp_path) == ["damaged-step-00000002", "step-00000001"]
    store.save(state(2))
    damage(store.path(2))
    store.put_aside(2)  # a second time, over the first
    assert store.steps() == [1]


def test_the_numbers_are_json_that_others_read(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.save(state(4))
    read = json.loads((store.path(4) / "state.json").read_text())
    assert read["step"] == 4 and read["progress"]["samples"] == 32
