"""Two exports into one folder at once: the second is refused, and neither leaves anything half-written."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
from pathlib import Path

import pytest

from stoker.checkpoint.export.claim_target import claimed_target
from stoker.errors import RunFailed, UserError


def is_refused(to: Path) -> bool:
    """Whether another process can claim the folder."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        said: str = pool.apply(_claim, (to,))
    assert said in ("", f"another export is writing to {to}; wait for its end, or give another --to")
    return bool(said)


def _claim(to: Path) -> str:
    try:
        with claimed_target(to):
            return ""
    except UserError as error:
        return str(error)


def test_a_folder_is_claimed_by_one_process(tmp_path: Path) -> None:
    to = tmp_path / "a" / "b" / "out"
    with claimed_target(to):
        assert is_refused(to) and not is_refused(to.with_name("other"))
        to.mkdir()
    assert [path.name for path in to.parent.iterdir()] == ["out"]
    (tmp_path / "a" / "b" / ".out.lock").touch()  # of a process that was killed
    assert not is_refused(to)


def test_a_failed_export_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RunFailed), claimed_target(tmp_path / "a" / "b" / "out"):
        raise RunFailed("the disk is full")
    assert not list(tmp_path.iterdir())


def test_an_export_that_ended_meanwhile_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock, to = fcntl.flock, tmp_path / "out"

    def later(descriptor: int, how: int) -> None:
        lock(descriptor, how)
        to.mkdir(exist_ok=True)
        (to / "config.json").touch()

    monkeypatch.setattr(fcntl, "flock", later)
    with pytest.raises(UserError, match="exists already"), claimed_target(to):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_file_system_without_locks_takes_exports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(descriptor: int, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refused)
    with claimed_target(tmp_path / "out"):
        pass
    assert not list(tmp_path.iterdir())
