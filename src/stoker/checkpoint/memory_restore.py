"""Restore from in-memory copies: boxes of whole tensors, resharded for the layout that reads them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from stoker.checkpoint.chunks import Chunk, Held
from stoker.checkpoint.object_collectives import rank, run_on_all_ranks
from stoker.checkpoint.save_plan import Item
from stoker.checkpoint.shm_buffers import Copy, copies_in, forget_copies
from stoker.checkpoint.state import Saved
from stoker.checkpoint.storage import BASE

Key = tuple[int, str]  # (step of the copies, group that made them)


@dataclass(frozen=True)
class MemoryCopies:
    """In-memory copies of one step on this machine, made by one group of processes.

    Attributes:
        group: group of the `WritePlan` that they were made under.
        copies: the copies on this machine.
        numbers: as in `stoker.checkpoint.state.State`.
        holders: by rank in that group, the current ranks whose machine has its copy.
    """

    step: int
    group: str
    copies: tuple[Copy, ...]
    numbers: Mapping[str, Any]
    holders: Mapping[int, Sequence[int]]

    def saved(self) -> dict[str, Saved]:
        """Returns shape and dtype of the whole tensors that the copies have boxes of."""
        return {item.name: Saved(item.shape, item.dtype) for copy in self.copies for item in copy.items}

    def covers(self, held: Held) -> bool:
        """Returns whether the copies contain all of ``held``."""
        items: dict[str, list[Item]] = {}
        for copy in self.copies:
            for item in copy.items:
                items.setdefault(item.name, []).append(item)

        def covered(name: str, chunk: Chunk) -> bool:
            """Written boxes do not overlap, so their volumes add up."""
            sizes = tuple(chunk.tensor.shape)
            same = [item for item in items.get(name, []) if item.shape == chunk.shape]
            boxes = (intersection(item.offsets, item.sizes, chunk.offsets, sizes) for item in same)
            found = sum(math.prod(high - low for low, high in box) for box in boxes if box is not None)
            return bool(same) and found == math.prod(sizes)

        return all(covered(name, chunk) for name, chunks in held.items() for chunk in chunks)

    @torch.no_grad()
    def fill(self, held: Held) -> None:
        """Copies the overlapping boxes into ``held``."""
        for copy in self.copies:
            for item, tensor in copy.tensors():
                for chunk in held.get(item.name, ()):
                    common = intersection(item.offsets, item.sizes, chunk.offsets, tuple(chunk.tensor.shape))
                    if common is not None:
                        target = chunk.place()[_within(common, chunk.offsets)]
                        target.copy_(tensor[_within(common, item.offsets)])
                        chunk.filled()


def steps_in_memory(folder: Path | None, before: int | None) -> list[MemoryCopies]:
    """Returns the steps whose copies are complete across the processes' machines, newest first. A collective.

    Args:
        folder: the run's folder in shared memory; None if there is none.
        before: only steps before this one.
    """
    mine: dict[Key, dict[int, Copy]] = {}

    def summary() -> dict[Key, tuple[frozenset[int], int]]:
        for copy in copies_in(folder) if folder is not None else []:
            mine.setdefault((copy.step, copy.group), {})[copy.rank] = copy
        return {key: (frozenset(copies), next(iter(copies.values())).world) for key, copies in mine.items()}

    summaries = run_on_all_ranks(summary)
    holders: dict[Key, dict[int, list[int]]] = {}
    worlds: dict[Key, int] = {}
    for process, found in enumerate(summaries):
        for key, (ranks, world) in found.items():
            worlds[key] = world
            for copied in ranks:
                holders.setdefault(key, {}).setdefault(copied, []).append(process)
    whole = [key for key, ranks in holders.items() if len(ranks) == worlds[key]]
    steps = sorted((key for key in whole if before is None or key[0] < before), reverse=True)
    first = {key: min(min(has) for has in holders[key].values()) for key in steps}

    def numbers_of() -> dict[Key, Mapping[str, Any]]:
        return {key: next(iter(mine[key].values())).numbers for key in steps if first[key] == rank()}

    numbers = {key: values for found in run_on_all_ranks(numbers_of) for key, values in found.items()}
    whole = [key for key in steps if BASE not in numbers[key]]  # the base that a checkpoint adds to is on disk only
    return [MemoryCopies(*key, tuple(mine.get(key, {}).values()), numbers[key], holders[key]) for key in whole]


def forget_after(folder: Path | None, step: int) -> None:
    """Deletes the copies of later steps, which the run will repeat. A collective."""
    if folder is not None:
        run_on_all_ranks(lambda: forget_copies([copy for copy in copies_in(folder) if copy.step > step]))


def intersection(
    offsets: Sequence[int], sizes: Sequence[int], other_offsets: Sequence[int], other_sizes: Sequence[int]
) -> list[tuple[int, int]] | None:
    """Returns the overlap of two boxes of a tensor, (start, stop) per dimension; None if they do not overlap."""
    common = []
    for a, n, b, m in zip(offsets, sizes, other_offsets, other_sizes, strict=True):
        low, high = max(a, b), min(a + n, b + m)
        if low >= high:
            return None
        common.append((low, high))
    return common


def _within(common: Sequence[tuple[int, int]], offsets: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(low - at, high - at) for (low, high), at in zip(common, offsets, strict=True))
