"""A server's log: what was written whole is read, and what was not is cut off."""

from __future__ import annotations

import errno
import io
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import SafetensorError

from stoker.errors import DiskFailed
from stoker.sparse.servers import step_log
from stoker.sparse.servers.step_log import StepLog
from stoker.sparse.sparse_state import SparseState, TableState

BASES = {"bases": {"checkpoint": 2}, "evicted": [np.arange(3), np.zeros(3, np.int64), np.full(3, 2)]}


def arrays_of(number: int) -> list[np.ndarray]:
    return [np.arange(number), np.full((number, 2), number / 3, np.float32)]


def written(folder: Path, steps: int) -> Path:
    """A log of steps 1, 2, ..."""
    log = StepLog(folder)
    for number in range(1, steps + 1):
        log.append({"scale": number / 7}, arrays_of(number))
    log.close()
    [path] = folder.glob("steps-*")
    return path


def found(folder: Path) -> list[float]:
    log = StepLog(folder)
    scales = []
    for header, arrays in log.steps():
        number = len(scales) + 1
        scales.append(header["scale"] * 7)
        assert all(np.array_equal(a, b) for a, b in zip(arrays, arrays_of(number), strict=True))
    log.close()
    return scales


def test_steps_are_read_as_they_were_written(tmp_path: Path) -> None:
    written(tmp_path, 3)
    assert found(tmp_path) == pytest.approx([1, 2, 3])


@pytest.mark.parametrize("lost", [1, 20, 60])
def test_a_step_that_was_being_written_did_not_happen(lost: int, tmp_path: Path) -> None:
    path = written(tmp_path, 3)
    path.write_bytes(path.read_bytes()[:-lost])
    assert found(tmp_path) == pytest.approx([1, 2])
    log = StepLog(tmp_path)
    log.append({"scale": 3 / 7}, arrays_of(3))
    log.close()
    assert found(tmp_path) == pytest.approx([1, 2, 3])


def test_the_log_goes_on_after_a_step_that_was_cut_off(tmp_path: Path) -> None:
    path = written(tmp_path, 3)
    path.write_bytes(path.read_bytes()[:-1])
    log = StepLog(tmp_path)
    assert len(list(log.steps())) == 2
    log.append({"scale": 3 / 7}, arrays_of(3))
    log.close()
    assert found(tmp_path) == pytest.approx([1, 2, 3])


def test_zeros_that_a_power_loss_leaves_are_cut_off(tmp_path: Path) -> None:
    path = written(tmp_path, 3)
    path.write_bytes(path.read_bytes() + bytes(4096))
    assert found(tmp_path) == found(tmp_path) == pytest.approx([1, 2, 3])


def test_a_damaged_step_is_cut_off(tmp_path: Path) -> None:
    path = written(tmp_path, 3)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert found(tmp_path) == pytest.approx([1, 2])


def test_a_snapshot_takes_the_place_of_the_steps_before(tmp_path: Path) -> None:
    written(tmp_path, 3)
    rows = torch.arange(2)
    table = TableState(rows, rows[:, None].float(), torch.empty(2, 0), rows.int(), rows.int())
    log = StepLog(tmp_path)
    log.begin([SparseState(3, None, {"t": table}), SparseState(3, None, {"u": table})], first=4, **BASES)  # type: ignore[arg-type]
    log.append({"scale": 1 / 7}, arrays_of(1))
    log.close()
    (tmp_path / "partial").mkdir()  # of a snapshot during which the server was killed
    again = StepLog(tmp_path)
    assert again.first == 4
    parts = list(again.snapshot())
    again.close()
    assert [(part.step, [*part.tables]) for part in parts] == [(3, ["t"]), (3, ["u"])]
    assert torch.equal(parts[0].tables["t"].values, table.values)
    assert found(tmp_path) == pytest.approx([1])
    assert len(list(tmp_path.iterdir())) == 3


def test_of_two_snapshots_the_newer_counts(tmp_path: Path) -> None:
    """A server that is killed once a snapshot has its name leaves the one before."""
    log = StepLog(tmp_path / "log")
    log.begin([], first=4, **BASES)  # type: ignore[arg-type]
    shutil.copytree(tmp_path / "log/snapshot-1", tmp_path / "kept")
    log.begin([], first=9, **BASES)  # type: ignore[arg-type]
    log.close()
    (tmp_path / "kept").rename(tmp_path / "log/snapshot-1")
    again = StepLog(tmp_path / "log")
    assert again.first == 9
    again.close()


class FullDisk:
    """A file of which the disk takes half of a write, once."""

    def __init__(self, file: io.FileIO) -> None:
        self.file, self.writes = file, 0

    def write(self, part: bytes | memoryview) -> int:
        self.writes += 1
        if self.writes == 2:
            self.file.write(memoryview(part)[: len(part) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")
        return self.file.write(part)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


def test_a_write_that_fails_leaves_nothing_in_the_log(tmp_path: Path) -> None:
    log = StepLog(tmp_path)
    log.append({"scale": 1 / 7}, arrays_of(1))
    log._file = FullDisk(log._file)  # type: ignore[assignment]
    with pytest.raises(DiskFailed, match="No space left"):
        log.append({"scale": 2 / 7}, arrays_of(2))
    log.append({"scale": 2 / 7}, arrays_of(2))
    log.close()
    assert found(tmp_path) == pytest.approx([1, 2])


def test_a_snapshot_that_fails_is_explained_and_frees_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(tensors: dict[str, torch.Tensor], path: Path) -> None:
        path.write_bytes(bytes(100))
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(step_log, "save_file", full)
    log = StepLog(tmp_path)
    log.append({"scale": 1 / 7}, arrays_of(1))
    rows = torch.arange(2)
    table = TableState(rows, rows[:, None].float(), torch.empty(2, 0), rows.int(), rows.int())
    with pytest.raises(DiskFailed, match=r"cannot be written: .*No space left"):
        log.begin([SparseState(3, None, {"t": table})], first=4, **BASES)  # type: ignore[arg-type]
    log.close()
    assert [path.name for path in tmp_path.iterdir()] == ["steps-0"]
    assert found(tmp_path) == pytest.approx([1])
