"""Damage of every kind to every file of the newest checkpoint: the one before is gone on from, to the bit."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from states import state

from stoker.checkpoint.dcp_store import Store
from stoker.checkpoint.saver import Saver
from stoker.checkpoint.snapshots import Snapshots
from stoker.errors import RunFailed

FILES = (".metadata", "__0_0.distcp", "state.json")


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def zero(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def grow(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\n0")


def remove(path: Path) -> None:
    path.unlink()


def swap(path: Path) -> None:
    """Replaces the file by that of another step."""
    older = path.parent.with_name("step-00000001") / path.name
    path.write_bytes(older.read_bytes())


def become_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def link_to_itself(path: Path) -> None:
    path.unlink()
    path.symlink_to(path)


def flip(place: float) -> Callable[[Path], None]:
    """One bit, at a share of the file."""

    def damage(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[int(place * (len(content) - 1))] ^= 4
        path.write_bytes(content)

    return damage


KINDS: dict[str, Callable[[Path], None]] = {
    **{kind.__name__: kind for kind in (cut, empty, zero, grow, remove, swap, become_a_folder, link_to_itself)},
    **{f"flip at {place}": flip(place) for place in (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)},
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    for step in (1, 2):
        Store(folder).save(state(step))
    return folder


# The metadata of all steps is the same: what is swapped is not damaged.
@pytest.mark.parametrize(("file", "kind"), [(f, k) for f in FILES for k in KINDS if (f, k) != (".metadata", "swap")])
def test_the_one_before_is_gone_on_from(file: str, kind: str, written: Path, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    shutil.copytree(written, folder)
    KINDS[kind](folder / "step-00000002" / file)
    found: list[dict[str, Any]] = []
    target = state(0)
    snapshots = Snapshots(tmp_path)
    saver = Saver(Store(folder), snapshots, event=lambda name, **values: found.append({"event": name, **values}))
    restored = saver.restore_newest(lambda _: target.held)
    assert restored is not None and restored.step == 1 and restored.numbers == state(1).numbers
    for name, tensor in state(1).tensors.items():
        assert torch.equal(target.tensors[name], tensor), name  # type: ignore[arg-type]
    assert [(e["event"], e["step"]) for e in found] == [("damaged", 2)]
    assert "step-00000002 is damaged: " in found[0]["error"]

    for step in (1, 2):  # and where the older one is damaged, too, all is refused and left as it is
        shutil.rmtree(folder / f"step-0000000{step}", ignore_errors=True)
        shutil.copytree(written / "step-00000001", folder / f"step-0000000{step}")
    KINDS[kind](folder / "step-00000001" / file) if kind != "swap" else remove(folder / "step-00000001" / file)
    before = sorted(path for path in folder.rglob("*"))
    for _ in range(2):
        with pytest.raises(RunFailed, match="nothing has been changed"):
            Saver(Store(folder), snapshots).restore_newest(lambda _: target.held)
        assert sorted(path for path in folder.rglob("*")) == before


def test_what_is_only_called_like_a_checkpoint_is_none(written: Path, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    shutil.copytree(written, folder)
    (folder / "step-00000003").mkdir()
    (folder / "step-00000004").write_text("a file")
    (folder / "step-00000005").symlink_to("nowhere")
    target = state(0)
    restored = Saver(Store(folder), Snapshots(tmp_path)).restore_newest(lambda _: target.held)
    assert restored is not None and restored.step == 2
