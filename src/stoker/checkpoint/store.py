"""Saving and restoring training states with PyTorch's distributed checkpoint.

A checkpoint is a folder ``step-00000060``: the tensors as torch.distributed.checkpoint writes them, and
``state.json`` with the numbers. It is written under another name, flushed to the disk and renamed, so a
checkpoint that can be seen is whole. One that the disk damaged later is found when it is loaded.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from stoker.errors import RunFailed

NAME = re.compile(r"step-(\d{8})")
LEFT_BEHIND = (".partial-step-*", ".doomed-step-*")  # by processes that were killed


class DamagedError(RunFailed):
    """A checkpoint cannot be read back: files of it are missing, cut or altered."""


@dataclass(frozen=True)
class State:
    """What a run needs to go on.

    Attributes:
        step: optimizer steps done.
        tensors: ``model/<parameter>`` and ``optimizer/<parameter>/<moment>``.
        numbers: everything else, as JSON: samples consumed, loss scale, best held-out loss ...
    """

    step: int
    tensors: dict[str, Tensor]
    numbers: dict[str, Any]


@dataclass(frozen=True)
class Store:
    """The checkpoints of a run."""

    folder: Path

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def steps(self) -> list[int]:
        """Steps with a whole checkpoint, ascending."""
        if not self.folder.is_dir():
            return []
        matches = (NAME.fullmatch(path.name) for path in self.folder.iterdir())
        return sorted(int(match[1]) for match in matches if match)

    def save(self, state: State) -> float:
        """Writes a checkpoint; returns the seconds it took.

        Raises:
            RunFailed: the disk is full or cannot be written; earlier checkpoints are untouched.
        """
        begin = time.perf_counter()
        target = self.path(state.step)
        if target.exists():
            return 0.0
        partial = self.folder / f".partial-{target.name}-{os.getpid()}"
        try:
            partial.mkdir(parents=True)
            with _one_process():
                dcp.save(dict(state.tensors), checkpoint_id=partial, no_dist=True)
            with (partial / "state.json").open("w", encoding="utf-8") as file:
                json.dump({"step": state.step, "files": _sizes(partial), **state.numbers}, file)
                file.flush()
                os.fsync(file.fileno())
            _flush_folder(partial)
            partial.rename(target)
            _flush_folder(self.folder)
        except (Exception, CheckpointException) as error:  # the latter is no Exception
            shutil.rmtree(partial, ignore_errors=True)
            raise self._explain(error, state.step) from error
        except BaseException:  # a second Ctrl-C
            shutil.rmtree(partial, ignore_errors=True)
            raise
        return time.perf_counter() - begin

    def _explain(self, error: BaseException, step: int) -> BaseException:
        cause = _os_error(error)
        if cause is None:
            return error
        full = cause.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        what = "the disk is full" if full else f"the disk cannot be written ({cause.strerror})"
        last = self.steps()[-1:]
        safe = f"the checkpoint of step {last[0]} is whole" if last else "no checkpoint had been written before"
        return RunFailed(
            f"{what}: the checkpoint of step {step} was not written to {self.folder}; {safe}. "
            "Make room and run the same command to go on"
        )

    def load(self, step: int) -> State:
        """Reads a checkpoint back.

        Raises:
            DamagedError: it is not as it was written.
        """
        path = self.path(step)
        try:
            numbers = json.loads((path / "state.json").read_text(encoding="utf-8"))
            expected = numbers.pop("files")
            if (found := _sizes(path)) != expected:
                odd = next(name for name in sorted({*expected, *found}) if found.get(name) != expected.get(name))
                raise ValueError(f"{odd} has {found.get(odd, 0)} bytes, and {expected.get(odd, 0)} were written")
            entries = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
            tensors = {
                key: torch.empty(entry.size, dtype=entry.properties.dtype)
                for key, entry in entries.items()
                if isinstance(entry, TensorStorageMetadata)
            }
            with _one_process():
                dcp.load(tensors, checkpoint_id=path, no_dist=True)
            return State(numbers.pop("step"), tensors, numbers)
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except (Exception, CheckpointException) as error:
            reason = str(_innermost(error)).strip().split("\n")[0]
            raise DamagedError(f"the checkpoint {path} is damaged: {reason}") from error

    def put_aside(self, step: int) -> Path:
        """Renames a damaged checkpoint: it is taken for one no more, and can be looked at. Says to what."""
        aside = self.folder / f"damaged-{self.path(step).name}"
        shutil.rmtree(aside, ignore_errors=True)
        self.path(step).rename(aside)
        return aside

    def retain(self, newest: int, also: int | None) -> None:
        """Deletes all but the newest checkpoints and one more (the best)."""
        for step in self.steps()[:-newest]:
            if step != also:
                doomed = self.folder / f".doomed-{self.path(step).name}-{os.getpid()}"
                self.path(step).rename(doomed)  # a checkpoint that is half deleted is never visible
                shutil.rmtree(doomed, ignore_errors=True)

    def clean(self) -> None:
        """Removes what killed processes left behind."""
        for pattern in LEFT_BEHIND:
            for path in self.folder.glob(pattern):
                shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _one_process() -> Iterator[None]:
    """Without the warning that one process is all there is."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _sizes(folder: Path) -> dict[str, int]:
    """Bytes of each file of a checkpoint but ``state.json``, which holds them."""
    return {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.name != "state.json"}


def _innermost(error: BaseException) -> BaseException:
    """What torch.distributed.checkpoint wraps its own error around."""
    failures = list(getattr(error, "failures", {}).values())
    return _innermost(failures[0][0]) if failures else error


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _os_error(error: BaseException) -> OSError | None:
    """The operating system's error inside what torch.distributed.checkpoint wraps around it."""
    if isinstance(error, OSError):
        return error
    inner = [*getattr(error, "failures", {}).values(), error.__cause__, error.__context__]
    for item in inner:
        candidate = item[0] if isinstance(item, tuple) else item
        if isinstance(candidate, BaseException) and (found := _os_error(candidate)) is not None:
            return found
    full = "No space left" in str(error) or "file write failed" in str(error)  # torch's own writer says no more
    return OSError(errno.ENOSPC, "No space left on device") if full else None
