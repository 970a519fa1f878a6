"""Restores from copies in the machine's memory: boxes of whole tensors, cut again for the layout that reads them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from stoker.checkpoint.chunks import Chunk, Held
from stoker.checkpoint.collective import by_first, together
from stoker.checkpoint.save_plan import Item
from stoker.checkpoint.shm_buffers import Copy, copies_in, forget_copies


@dataclass(frozen=True)
class Remembered:
    """The copies of one step that this machine has, made by one group of processes.

    Attributes:
        group: of the agreement that they were made under.
        numbers: as `stoker.checkpoint.store.State` has them.
    """

    step: int
    group: str
    copies: tuple[Copy, ...]
    numbers: Mapping[str, Any]

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
            boxes = (_intersection(item.offsets, item.sizes, chunk.offsets, sizes) for item in same)
            found = sum(math.prod(high - low for low, high in box) for box in boxes if box is not None)
            return bool(same) and found == math.prod(sizes)

        return all(covered(name, chunk) for name, chunks in held.items() for chunk in chunks)

    @torch.no_grad()
    def fill(self, held: Held) -> None:
        """Copies the boxes that ``held`` asks for."""
        for copy in self.copies:
            for item, tensor in copy.tensors():
                for chunk in held.get(item.name, ()):
                    common = _intersection(item.offsets, item.sizes, chunk.offsets, tuple(chunk.tensor.shape))
                    if common is not None:
                        target = chunk.tensor[_within(common, chunk.offsets)]
                        target.copy_(tensor[_within(common, item.offsets)])


def remembered(folder: Path | None, before: int | None) -> list[Remembered]:
    """The steps of which every process finds copies on its own machine, newest first. A collective.

    On one machine the copies of all processes that made them are there, or the step does not count; of several,
    each has those of its own processes, which are enough under the same layout (see `Remembered.covers`).

    Args:
        folder: of the run, in shared memory; None where there is none.
        before: only steps before this one.
    """

    def look() -> dict[tuple[int, str], tuple[Copy, ...]]:
        found: dict[tuple[int, str], dict[int, Copy]] = {}
        for copy in copies_in(folder) if folder is not None else []:
            found.setdefault((copy.step, copy.group), {})[copy.rank] = copy
        return {key: tuple(copies.values()) for key, copies in found.items()}

    mine: dict[tuple[int, str], tuple[Copy, ...]] = {}

    def summary() -> dict[tuple[int, str], tuple[frozenset[int], int]]:
        nonlocal mine
        mine = look()
        return {key: (frozenset(copy.rank for copy in copies), copies[0].world) for key, copies in mine.items()}

    said = together(summary)
    everywhere = set(said[0]).intersection(*said)
    whole = {key for key in everywhere if len(frozenset().union(*(found[key][0] for found in said))) == said[0][key][1]}
    steps = sorted((key for key in whole if before is None or key[0] < before), reverse=True)
    numbers: dict[tuple[int, str], Mapping[str, Any]] = by_first(lambda: {key: mine[key][0].numbers for key in steps})
    return [Remembered(*key, mine[key], numbers[key]) for key in steps]


def forget_after(folder: Path | None, step: int) -> None:
    """Forgets the copies of later steps, which the run is going to take another time. A collective."""
    if folder is not None:
        together(lambda: forget_copies([copy for copy in copies_in(folder) if copy.step > step]))


def _intersection(
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
