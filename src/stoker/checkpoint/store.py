"""Saving and restoring training states with PyTorch's distributed checkpoint.

A checkpoint is a folder ``step-00000060``: the tensors as torch.distributed.checkpoint writes them, and
``state.json`` with the numbers. It is written under another name, flushed to the disk and renamed, so a
checkpoint that can be seen is whole. One that the disk damaged later is found when it is loaded.

Tensors have the names and shapes of the whole model, whatever the layout: each process writes and reads its own
chunks of them, so that a run goes on under any other layout, and one process can read everything.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from stoker.checkpoint.causes import innermost, os_error
from stoker.checkpoint.chunks import Chunk, Held
from stoker.checkpoint.planners import ChunkLoader, ChunkSaver
from stoker.checkpoint.together import by_first, rank, together
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
        tensors: ``model/<parameter>``, ``optimizer/<parameter>/<moment>`` and ``buffer/<name>``: whole, or what this
            process holds of them.
        numbers: everything else, as JSON: samples consumed, loss scale, best held-out loss ...
    """

    step: int
    tensors: Mapping[str, Tensor | Sequence[Chunk]]
    numbers: dict[str, Any]


@dataclass(frozen=True)
class Saved:
    """A tensor in a checkpoint."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Store:
    """The checkpoints of a run.

    Where torch.distributed is initialised all methods but `path` and `steps` are collective: every process calls
    them with the same step, and an error of one is raised on all.
    """

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
        held = {name: [Chunk.whole(t)] if isinstance(t, Tensor) else t for name, t in state.tensors.items()}
        unfinished = None
        try:
            unfinished = by_first(lambda: self._begin(state.step))
            if unfinished is None:
                return 0.0
            metadata = _write(unfinished, held)
            by_first(lambda: self._finish(unfinished, state, metadata))
        except (Exception, CheckpointException) as error:  # the latter is no Exception
            self._give_up(unfinished)
            raise self._explain(error, state.step) from error
        except BaseException:  # a second Ctrl-C
            self._give_up(unfinished)
            raise
        return time.perf_counter() - begin

    def _begin(self, step: int) -> Path | None:
        """The folder to write into; None where the checkpoint is there already."""
        target = self.path(step)
        if target.exists():
            return None
        unfinished = self.folder / f".partial-{target.name}-{os.getpid()}"
        unfinished.mkdir(parents=True)
        return unfinished

    def _finish(self, unfinished: Path, state: State, metadata: Metadata) -> None:
        """Adds the numbers, once all processes have written, and makes the checkpoint visible."""
        sizes = _sizes(unfinished)
        if lost := {info.relative_path for info in metadata.storage_data.values()} - set(sizes):
            raise RunFailed(
                f"{min(lost)} was written to {self.folder} on another machine and cannot be seen on this one: "
                "checkpoint.to must be a folder that all machines share"
            )
        with (unfinished / "state.json").open("w", encoding="utf-8") as file:
            json.dump({"step": state.step, "files": sizes, **state.numbers}, file)
            file.flush()
            os.fsync(file.fileno())
        _flush_folder(unfinished)
        unfinished.rename(self.path(state.step))
        _flush_folder(self.folder)

    def _give_up(self, unfinished: Path | None) -> None:
        if unfinished is not None and rank() == 0:
            shutil.rmtree(unfinished, ignore_errors=True)

    def _explain(self, error: BaseException, step: int) -> BaseException:
        cause = os_error(error)
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
        """Reads a checkpoint back, every tensor whole.

        Raises:
            DamagedError: it is not as it was written.
        """
        tensors: dict[str, Tensor] = {}

        def places(saved: Mapping[str, Saved]) -> Held:
            tensors.update((name, torch.empty(entry.shape, dtype=entry.dtype)) for name, entry in saved.items())
            return {name: [Chunk.whole(tensor)] for name, tensor in tensors.items()}

        numbers = self.restore(step, places)
        return State(step, tensors, numbers)

    def restore(self, step: int, places: Callable[[Mapping[str, Saved]], Held]) -> dict[str, Any]:
        """Reads a checkpoint into the chunks that ``places`` gives when told what there is; returns the numbers.

        Each process reads no tensor that it holds nothing of.

        Raises:
            DamagedError: it is not as it was written.
            RunFailed: it is of another model: names or shapes differ.
        """
        path = self.path(step)
        with _damage(path):
            numbers, saved = by_first(lambda: _open(path))
        held: Held = {}

        def match() -> set[str]:
            nonlocal held
            held = places(saved)
            for name, chunks in held.items():
                if name in saved and (wrong := {c.shape for c in chunks} - {saved[name].shape}):
                    self._mismatch(step, f"{name} is {saved[name].shape} in it, and {wrong.pop()} here")
            return set(held)

        if odd := sorted(set().union(*together(match)) ^ set(saved)):
            self._mismatch(step, f"{odd[0]} is only in one of them")
        with _damage(path), _one_process():
            dcp.load(dict(held), checkpoint_id=path, planner=ChunkLoader())
        return numbers

    def _mismatch(self, step: int, how: str) -> NoReturn:
        raise RunFailed(f"the checkpoint of step {step} is of another model: {how}")

    def put_aside(self, step: int) -> Path:
        """Renames a damaged checkpoint: it is taken for one no more, and can be looked at. Says to what."""

        def move() -> Path:
            aside = self.folder / f"damaged-{self.path(step).name}"
            shutil.rmtree(aside, ignore_errors=True)
            return self.path(step).rename(aside)

        return by_first(move)

    def retain(self, newest: int, also: int | None) -> None:
        """Deletes all but the newest checkpoints and one more (the best)."""

        def delete() -> None:
            for step in self.steps()[:-newest]:
                if step != also:
                    doomed = self.folder / f".doomed-{self.path(step).name}-{os.getpid()}"
                    self.path(step).rename(doomed)  # a checkpoint that is half deleted is never visible
                    shutil.rmtree(doomed, ignore_errors=True)

        by_first(delete)

    def clean(self) -> None:
        """Removes what killed processes left behind."""

        def remove() -> None:
            for pattern in LEFT_BEHIND:
                for path in self.folder.glob(pattern):
                    shutil.rmtree(path, ignore_errors=True)

        by_first(remove)


def _write(folder: Path, held: Held) -> Metadata:
    with _one_process():
        metadata = dcp.save(dict(held), checkpoint_id=folder, planner=ChunkSaver())
    assert isinstance(metadata, Metadata)
    return metadata


def _open(path: Path) -> tuple[dict[str, Any], dict[str, Saved]]:
    """The numbers of a checkpoint, and what tensors it has; fails where files are not as they were written."""
    numbers = json.loads((path / "state.json").read_text(encoding="utf-8"))
    expected = numbers.pop("files")
    if (found := _sizes(path)) != expected:
        odd = next(name for name in sorted({*expected, *found}) if found.get(name) != expected.get(name))
        raise ValueError(f"{odd} has {found.get(odd, 0)} bytes, and {expected.get(odd, 0)} were written")
    entries = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    del numbers["step"]
    return numbers, {
        name: Saved(tuple(entry.size), entry.properties.dtype)
        for name, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }


@contextmanager
def _damage(path: Path) -> Iterator[None]:
    """What goes wrong within is damage to the checkpoint; memory that runs out is not."""
    try:
        yield
    except (Exception, CheckpointException) as error:  # the latter is no Exception
        inner = innermost(error)
        if isinstance(inner, (MemoryError, torch.OutOfMemoryError)):
            raise inner from error
        reason = str(inner).strip().split("\n")[0]
        raise DamagedError(f"the checkpoint {path} is damaged: {reason}") from error


@contextmanager
def _one_process() -> Iterator[None]:
    """Without the warning that one process is all there is."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _sizes(folder: Path) -> dict[str, int]:
    """Bytes of each file of a checkpoint but ``state.json``, which holds them."""
    return {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.name != "state.json"}


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
