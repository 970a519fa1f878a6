"""Exchange of in-memory copies between machines, for those that lack copies when a run is restored."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from stoker.checkpoint.chunks import Held
from stoker.checkpoint.memory_restore import MemoryCopies, intersection
from stoker.checkpoint.object_collectives import rank, run_on_all_ranks
from stoker.checkpoint.save_plan import Item
from stoker.checkpoint.shm_buffers import Copy, allocate
from stoker.node_cache.cache_entry import boot_id

PIECE = 64 * 2**20  # bytes sent at once
Machine = tuple[str, int, int]  # see `_machine`


@dataclass(frozen=True)
class _Transfer:
    """A copy that one process sends to another, which stores it for all processes of its machine."""

    copied: int
    sender: int
    receiver: int


@contextmanager
def fetched(copy: MemoryCopies, folder: Path, held: Held) -> Iterator[MemoryCopies]:
    """Fetches copies from other machines that this machine's processes need, for the length of the block. A collective.

    Args:
        folder: the run's folder in shared memory.
        held: chunks that this process needs.

    Raises:
        OSError: a machine has no memory for them.
    """
    have = {each.rank: each for each in copy.copies}
    known = {rank: each for found in run_on_all_ranks(lambda: _first_had(copy)) for rank, each in found.items()}
    needs = {copied for copied, each in known.items() if copied not in have and _is_needed(each.items, held)}
    processes = run_on_all_ranks(lambda: (_machine(folder), frozenset(needs)))
    transfers = _transfers(copy.holders, processes)
    arrived = {t.copied: folder / f"rank-{t.copied}" / "fetched" for t in transfers if t.receiver == rank()}
    machine = processes[rank()][0]
    here = {t.copied for t in transfers if processes[t.receiver][0] == machine}
    try:
        run_on_all_ranks(lambda: _make_room(arrived, known))
        for transfer in transfers:
            if rank() == transfer.sender:
                _send(have[transfer.copied], transfer.receiver)
            elif rank() == transfer.receiver:
                _receive(arrived[transfer.copied], known[transfer.copied].length, transfer.sender)
        run_on_all_ranks(lambda: None)
        more = [
            Copy(
                data=folder / f"rank-{n}" / "fetched",
                step=copy.step,
                group=copy.group,
                rank=n,
                world=len(known),
                items=known[n].items,
                numbers=copy.numbers,
            )
            for n in sorted(here)
        ]
        yield replace(copy, copies=(*copy.copies, *more))
        run_on_all_ranks(lambda: None)
    finally:
        for path in arrived.values():
            path.unlink(missing_ok=True)


@dataclass(frozen=True)
class _Known:
    """The items of a copy, and the size of its file in bytes."""

    items: tuple[Item, ...]
    length: int


def _first_had(copy: MemoryCopies) -> dict[int, _Known]:
    """Returns the copies that this process, by rank, is the first to have."""
    mine = [each for each in copy.copies if min(copy.holders[each.rank]) == rank()]
    return {each.rank: _Known(each.items, each.data.stat().st_size) for each in mine}


def _machine(folder: Path) -> Machine:
    """Identifies the memory that a folder is in: equal for processes that share it, and for no others."""
    found = folder.stat()
    return boot_id(), found.st_dev, found.st_ino


def _is_needed(items: tuple[Item, ...], held: Held) -> bool:
    """Returns whether any box of a copy overlaps a needed chunk."""
    return any(
        intersection(item.offsets, item.sizes, chunk.offsets, tuple(chunk.tensor.shape)) is not None
        for item in items
        for chunk in held.get(item.name, ())
    )


def _transfers(
    holders: Mapping[int, Sequence[int]], processes: Sequence[tuple[Machine, frozenset[int]]]
) -> list[_Transfer]:
    """Assigns senders and receivers: each machine receives a copy once, and holders take turns.

    Args:
        holders: see `MemoryCopies`.
        processes: the machine of each process, and the copies that it needs.
    """
    wanted: dict[Machine, set[int]] = {}
    receivers: dict[Machine, list[int]] = {}
    for process, (machine, needs) in enumerate(processes):
        wanted.setdefault(machine, set()).update(needs)
        receivers.setdefault(machine, []).append(process)
    found = []
    for turn, (machine, copies) in enumerate(wanted.items()):
        for number, copied in enumerate(sorted(copies)):
            have, here = holders[copied], receivers[machine]
            found.append(_Transfer(copied, have[turn % len(have)], here[number % len(here)]))
    return sorted(found, key=lambda transfer: (transfer.copied, transfer.receiver))


def _make_room(arriving: Mapping[int, Path], known: Mapping[int, _Known]) -> None:
    for copied, path in arriving.items():
        path.parent.mkdir(exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | getattr(os, "O_NOFOLLOW", 0), 0o600)
        try:
            if known[copied].length:
                allocate(descriptor, known[copied].length)
        finally:
            os.close(descriptor)


def _send(copy: Copy, receiver: int) -> None:
    size = copy.data.stat().st_size
    for piece in _pieces(copy.data, size, shared=False):
        dist.send(piece, receiver)


def _receive(path: Path, size: int, sender: int) -> None:
    for piece in _pieces(path, size, shared=True):
        dist.recv(piece, sender)


def _pieces(path: Path, size: int, *, shared: bool) -> Iterator[Tensor]:
    if size:
        data = torch.from_file(str(path), shared=shared, size=size, dtype=torch.uint8)
        yield from data.split(PIECE)
