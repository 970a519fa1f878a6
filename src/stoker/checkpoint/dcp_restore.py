"""Reading of a checkpoint, with the rows of its base, and the check that it has not changed since it was written."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from stoker.checkpoint.checksums import Files, check_contents, check_sizes
from stoker.checkpoint.chunks import Held
from stoker.checkpoint.dcp_errors import innermost
from stoker.checkpoint.dcp_planners import ChunkLoader
from stoker.checkpoint.dcp_reader import RestrictedReader
from stoker.checkpoint.object_collectives import by_first, run_on_all_ranks
from stoker.checkpoint.state import DamagedError, Places, Saved
from stoker.checkpoint.storage import BASE, Storage, read_state
from stoker.checkpoint.tensor_names import BASE_ROWS, ISLAND, OUTER, POWER_SGD, ROWS
from stoker.errors import RunFailed, UserError
from stoker.hardware.machine_limits import is_peer_gone
from stoker.node_cache.download import ObjectChanged


def read_numbers(storage: Storage, step: int, *, where: str) -> dict[str, Any]:
    """Reads a checkpoint's data beside its tensors.

    Args:
        where: the checkpoint's name in messages.

    Raises:
        DamagedError: it has changed since it was written.
    """
    with _damage(where):
        return _split(read_state(storage, step))[0]


def read_checkpoint(
    storage: Storage, step: int, places: Places, *, where: str, steps: Callable[[], Sequence[int]]
) -> dict[str, Any]:
    """Reads a checkpoint into the chunks that ``places`` returns for its tensors; returns the numbers.

    Each process reads only tensors that it holds a part of, beside the files whose contents it checks.

    Args:
        where: the checkpoint's name in messages.
        steps: lists the steps with a complete checkpoint, for the base.

    Raises:
        DamagedError: it has changed since it was written.
        RunFailed: it is of another model: names or shapes differ. State of islands and of PowerSGD may be missing.
    """
    with _damage(where):
        numbers, sources, saved = by_first(lambda: _open_with_base(storage, step, steps))
        for source, files in sources:
            check_contents(storage, source, files)
    held: Held = {}

    def match() -> set[str]:
        nonlocal held
        held = places(saved)
        for name, chunks in held.items():
            if name in saved and (wrong := {c.shape for c in chunks} - {saved[name].shape}):
                _mismatch(step, f"{name} is {saved[name].shape} in it, and {wrong.pop()} here")
        return set(held)

    needed = {name for name in saved if not name.startswith((ISLAND, OUTER, POWER_SGD))}
    if odd := sorted((wanted := set().union(*run_on_all_ranks(match))) - set(saved) | needed - wanted):
        _mismatch(step, f"{odd[0]} is only in one of them")
    with _damage(where), _one_process():
        for source, files in sources:
            own = {name: chunks for name, chunks in held.items() if name.startswith(BASE_ROWS) == (source != step)}
            own = {ROWS + n.removeprefix(BASE_ROWS) if source != step else n: chunks for n, chunks in own.items()}
            reader = RestrictedReader(storage.path(source), files)
            if own or source == step:
                dcp.load(own, storage_reader=reader, planner=ChunkLoader())
    return numbers


def _open_with_base(
    storage: Storage, step: int, steps: Callable[[], Sequence[int]]
) -> tuple[dict[str, Any], list[tuple[int, Files]], dict[str, Saved]]:
    """Opens a checkpoint as `_open` does, with the rows of its base, whose files come first."""
    numbers, files, saved = _open(storage, step)
    base = numbers.get(BASE)
    if base is None:
        return numbers, [(step, files)], saved
    if base not in steps():
        raise FileNotFoundError(f"it adds to the checkpoint of step {base}, which is not there")
    _, base_files, rows = _open(storage, base)
    before = {BASE_ROWS + n.removeprefix(ROWS): entry for n, entry in rows.items() if n.startswith(ROWS)}
    return numbers, [(base, base_files), (step, files)], saved | before


def _open(storage: Storage, step: int) -> tuple[dict[str, Any], Files, dict[str, Saved]]:
    """Returns the numbers, files and tensors of a checkpoint; raises where the sizes of files have changed."""
    numbers, files = _split(read_state(storage, step))
    check_sizes(storage, step, files)
    entries = RestrictedReader(storage.path(step), files).read_metadata().state_dict_metadata
    saved = {
        name: Saved(tuple(entry.size), entry.properties.dtype)
        for name, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    return numbers, files, saved


def _mismatch(step: int, how: str) -> NoReturn:
    raise RunFailed(f"the checkpoint of step {step} is of another model: {how}")


@contextmanager
def _damage(where: str) -> Iterator[None]:
    """Converts errors within the block to damage of the checkpoint at ``where``.

    Errors that say nothing about its files stay: a lack of memory, a lost process, a download that failed.
    """
    try:
        yield
    except (Exception, CheckpointException) as error:  # the latter is not an Exception
        inner = innermost(error)
        failed_download = isinstance(inner, UserError) and not isinstance(inner, ObjectChanged)
        if isinstance(inner, (MemoryError, torch.OutOfMemoryError)) or failed_download or is_peer_gone(inner):
            if inner is error:
                raise
            raise inner from error
        reason = str(inner).strip().split("\n")[0]
        raise DamagedError(f"the checkpoint {where} is damaged: {reason}") from error


def _split(state: dict[str, Any]) -> tuple[dict[str, Any], Files]:
    """Splits ``state.json`` into the numbers and the files."""
    return {key: value for key, value in state.items() if key not in ("step", "files")}, state["files"]


@contextmanager
def _one_process() -> Iterator[None]:
    """Silences the warning that torch.distributed is not initialised."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
