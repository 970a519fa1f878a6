"""Restores from copies in the machine's memory: boxes of whole tensors, cut again for the layout that reads them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from stoker.checkpoint.chunks import Chunk, Held
from stoker.checkpoint.collective import rank, together
from stoker.checkpoint.save_plan import Item
from stoker.checkpoint.shm_buffers import Copy, copies_in, forget_copies
from stoker.checkpoint.storage import BASE

Key = tuple[int, str]  # the step of copies, and the group that made them


@dataclass(frozen=True)
class MemoryCopies:
    """The copies of one step that this machine has, made by one group of processes.

    Attributes:
        group: of the agreement that they were made under.
        copies: those of this machine.
        numbers: as `stoker.checkpoint.store.State` has them.
        holders: ranks of today's processes whose machine has the copy of a rank of that group.
    """

    step: int
    group: str
    copies: tuple[Copy, ...]
    numbers: Mapping[str, Any]
    holders: Mapping[int, Sequence[int]]

    def saved(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and type of the whole tensors that there are boxes of."""
        return {item.name: (item.shape, item.dtype) for copy in self.copies for item in copy.items}

    def covers(self, held: Held) -> bool:
        """Whether all that ``held`` asks for is there."""
        items: dict[str, list[Item]] = {}
        for copy in self.copies:
            for item in copy.items:
                items.setdefault(item.name, []).append(item)

        def covered(name: str, chunk: Chunk) -> bool:
            """Boxes that are written do not overlap, so their volumes add up."""
            sizes = tuple(chunk.tensor.shape)
            same = [item for item in items.get(name, []) if item.shape == chunk.shape]
            boxes = (intersection(item.offsets, item.sizes, chunk.offsets, sizes) for item in same)
            found = sum(math.prod(high - low for low, high in box) for box in boxes if box is not None)
            return bool(same) and found == math.prod(sizes)

        return all(covered(name, chunk) for name, chunks in held.items() for chunk in chunks)

    @torch.no_grad()
    def fill(self, held: Held) -> None:
        """Copies the boxes that ``held`` asks for."""
        for copy in self.copies:
            for item, tensor in copy.tensors():
                for chunk in held.get(item.name, ()):
                    common = intersection(item.offsets, item.sizes, chunk.offsets, tuple(chunk.tensor.shape))
                    if common is not None:
                        target = chunk.place()[_within(common, chunk.offsets)]
                        target.copy_(tensor[_within(common, item.offsets)])
                        chunk.filled()


def remembered(folder: Path | None, before: int | None) -> list[MemoryCopies]:
    """The steps of which the processes' machines together have the copies of all that made them, newest first.

    A collective.

    Args:
        folder: of the run, in shared memory; None where there is none.
        before: only steps before this one.
    """
    mine: dict[Key, dict[int, Copy]] = {}

    def summary() -> dict[Key, tuple[frozenset[int], int]]:
        for copy in copies_in(folder) if folder is not None else []:
            mine.setdefault((copy.step, copy.group), {})[copy.rank] = copy
        return {key: (frozenset(copies), next(iter(copies.values())).world) for key, copies in mine.items()}

    said = together(summary)
    holders: dict[Key, dict[int, list[int]]] = {}
    worlds: dict[Key, int] = {}
    for process, found in enumerate(said):
        for key, (ranks, world) in found.items():
            worlds[key] = world
            for copied in ranks:
                holders.setdefault(key, {}).setdefault(copied, []).append(process)
    whole = [key for key, ranks in holders.items() if len(ranks) == worlds[key]]
    steps = sorted((key for key in whole if before is None or key[0] < before), reverse=True)
    first = {key: min(min(has) for has in holders[key].values()) for key in steps}

    def numbers_of() -> dict[Key, Mapping[str, Any]]:
        return {key: next(iter(mine[key].values())).numbers for key in steps if first[key] == rank()}

    numbers = {key: values for found in together(numbers_of) for key, values in found.items()}
    whole = [key for key in steps if BASE not in numbers[key]]  # what others add to is on the disk alone
    return [MemoryCopies(*key, tuple(mine.get(key, {}).values()), numbers[key], holders[key]) for key in whole]


def forget_after(folder: Path | None, step: int) -> None:
    """Forgets the copies of later steps, which the run is going to take another time. A collective."""
    if folder is not None:
        together(lambda: forget_copies([copy for copy in copies_in(folder) if copy.step > step]))


def intersection(
    offsets: Sequence[int], sizes: Sequence[int], other_offsets: Sequence[int], other_sizes: Sequence[int]
) -> list[tuple[int, int]] | None:
    """Where two boxes of a tensor overlap, from and to in each dimension; None where they do not."""
    common = []
    for a, n, b, m in zip(offsets, sizes, other_offsets, other_sizes, strict=True):
        low, high = max(a, b), min(a + n, b + m)
        if low >= high:
            return None
        common.append((low, high))
    return common


def _within(common: Sequence[tuple[int, int]], offsets: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(low - at, high - at) for (low, high), at in zip(common, offsets, strict=True))
