"""Checkpoints: whole or not there, kept as asked for, and found out when the disk has damaged them."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from states import assert_saved, state, visible

from stoker.checkpoint.dcp_file_layout import DcpFileLayout
from stoker.checkpoint.dcp_planners import ChunkSaver
from stoker.checkpoint.dcp_store import Store
from stoker.checkpoint.retention import Keep
from stoker.checkpoint.state import DamagedError, State
from stoker.errors import CannotRun, RunFailed
from stoker.node_cache.download import ObjectChanged


def test_what_is_saved_is_loaded_to_the_bit(tmp_path: Path) -> None:
    store = Store(tmp_path / "deep" / "checkpoints")
    assert store.steps() == []
    assert store.save(state(3)).bytes > 0
    assert store.save(state(3)).bytes == 0  # it is there already
    assert_saved(store, 3)


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for step in (5, 10, 15, 20):
        store.save(state(step))
    store.retain(Keep(2, best=5))
    assert store.steps() == [5, 15, 20]
    store.retain(Keep(1))
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

    assert "step 1 is whole" in str(caught.value) and "run the same command to continue" in str(caught.value)
    assert visible(tmp_path) == ["step-00000001"]
    assert torch.equal(store.load(1).tensors["model/a"], state(1).tensors["model/a"])
    assert store.save(state(2)).bytes > 0


def test_the_first_write_that_fails_says_that_there_is_no_other(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFailed, match="there is no other checkpoint"):
        Store(tmp_path / "file" / "checkpoints").save(state(1))


def test_a_bug_is_no_full_disk(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        Store(tmp_path).save(State(1, {}, {"progress": object()}))
    assert visible(tmp_path) == []


def test_an_interrupted_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(DcpFileLayout, "write", interrupt)
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


def change_a_number(path: Path) -> None:
    changed = (path / "state.json").read_text().replace('"samples": 16', '"samples": 24')
    assert '"samples": 24' in changed
    (path / "state.json").write_text(changed)


def rename_the_checksum(path: Path) -> None:
    text = (path / "state.json").read_text()
    at = text.rindex('"sha256"')
    (path / "state.json").write_text(text[:at] + text[at:].replace("sha256", "sha257"))


def swap_the_numbers(path: Path) -> None:
    (path / "state.json").write_bytes((path.with_name("step-00000001") / "state.json").read_bytes())


def swap_everything(path: Path) -> None:
    shutil.rmtree(path)
    shutil.copytree(path.with_name("step-00000001"), path)


def lose_metadata(path: Path) -> None:
    (path / ".metadata").unlink()


def garble_metadata(path: Path) -> None:
    size = (path / ".metadata").stat().st_size
    (path / ".metadata").write_bytes(b"\x00" * size)


def flip_a_bit(path: Path) -> None:
    (file,) = path.glob("*.distcp")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(
    "damage",
    [
        cut,
        lose_tensors,
        lose_numbers,
        garble_numbers,
        change_a_number,
        rename_the_checksum,
        swap_the_numbers,
        swap_everything,
        lose_metadata,
        garble_metadata,
        flip_a_bit,
    ],
)
def test_damage_is_found_and_put_aside(damage: object, tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.save(state(1))
    store.save(state(2))
    assert callable(damage)
    damage(store.storage.path(2))
    with pytest.raises(DamagedError, match="step-00000002 is damaged"):
        store.load(2)
    store.put_aside(2)
    assert store.steps() == [1] and visible(tmp_path) == ["damaged-step-00000002", "step-00000001"]
    store.save(state(2))
    store.put_aside(2)  # a second time, over the first
    assert store.steps() == [1]


@pytest.mark.parametrize("at", ["check_contents", "RestrictedReader.read_data"])
@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4711"), RuntimeError),
        (RunFailed("s3://bucket/__0_0.distcp cannot be downloaded: timed out"), RunFailed),
        (CannotRun("no credentials"), CannotRun),
        (MemoryError(), MemoryError),
        (ObjectChanged("s3://bucket/__0_0.distcp has changed while it was read"), DamagedError),
        (RuntimeError("PytorchStreamReader failed reading zip archive"), DamagedError),
    ],
)
def test_what_is_not_in_its_files_is_no_damage(
    at: str, error: Exception, kind: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise error

    store = Store(tmp_path)
    store.save(state(1))
    monkeypatch.setattr(f"stoker.checkpoint.dcp_restore.{at}", fail)
    with pytest.raises(kind) as caught:
        store.load(1)
    assert type(caught.value) is kind


def test_the_numbers_are_json_that_others_read(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.save(state(4))
    read = json.loads((store.storage.path(4) / "state.json").read_text())
    assert read["step"] == 4 and read["progress"]["samples"] == 32


@pytest.mark.slow
def test_every_flipped_bit_of_the_numbers_is_found(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.save(state(1))
    path = store.storage.path(1) / "state.json"
    written = path.read_bytes()
    for at in range(len(written)):
        for bit in range(8):
            path.write_bytes(written[:at] + bytes([written[at] ^ 1 << bit]) + written[at + 1 :])
            try:
                numbers = store.numbers(1)
            except DamagedError:
                continue
            assert numbers == state(1).numbers, (at, bit)  # one kind of space for another


def test_numbers_without_a_checksum_are_those_of_an_older_version(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.save(state(1))
    path = store.storage.path(1) / "state.json"
    values = json.loads(path.read_text())
    del values["sha256"]
    path.write_text(json.dumps(values))
    assert_saved(store, 1)


def test_a_flipped_bit_names_the_file(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.save(state(1))
    flip_a_bit(store.storage.path(1))
    with pytest.raises(DamagedError, match=r"__0_0\.distcp has other contents than were written"):
        store.load(1)


def test_the_sums_are_those_that_other_programs_find(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.save(state(1))
    listed = json.loads((store.storage.path(1) / "state.json").read_text())["files"]
    for name, file in listed.items():
        content = (store.storage.path(1) / name).read_bytes()
        assert file == {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def test_pytorch_reads_and_writes_the_same(tmp_path: Path) -> None:
    """What torch.distributed.checkpoint itself loads from a checkpoint, and writes for the same state."""
    store = Store(tmp_path)
    store.save(state(1))
    loaded = {name: torch.empty_like(tensor) for name, tensor in state(1).tensors.items()}
    dcp.load(loaded, checkpoint_id=store.storage.path(1))
    for name, tensor in state(1).tensors.items():
        assert torch.equal(loaded[name], tensor), name
    dcp.save(dict(state(1).held), checkpoint_id=tmp_path / "own", planner=ChunkSaver())
    ours, theirs = ((folder / "__0_0.distcp").read_bytes() for folder in (store.storage.path(1), tmp_path / "own"))
    # Only the archives' own checksums differ, which PyTorch does not look at: they are left out.
    assert len(ours) == len(theirs) and sum(a != b for a, b in zip(ours, theirs, strict=True)) < 50 * len(loaded)


def test_every_so_many_are_kept_for_ever() -> None:
    steps = list(range(10, 110, 10))
    assert Keep(2).doomed(steps) == steps[:-2]
    assert Keep(2, every=30, best=20).doomed(steps) == [10, 40, 50, 70, 80]
