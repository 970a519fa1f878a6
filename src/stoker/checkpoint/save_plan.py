"""Plan of a save, on which the processes agree: which process writes which box, and where in which file.

It depends on names, shapes and layout only, so it is made once for all checkpoints and copies of a run.

The planning, the file format and the metadata are those of torch.distributed.checkpoint: one archive of `torch.save`
per tensor, which is made without the tensor's bytes and stored as a `DcpFileLayout`.
"""

from __future__ import annotations

import io
import os
import pickle
import socket
import uuid
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, cast

import psutil
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.serialization import skip_data

from stoker.checkpoint.chunks import Held
from stoker.checkpoint.dcp_file_layout import DcpFileLayout, DcpFilePart
from stoker.checkpoint.dcp_planners import ChunkSaver
from stoker.checkpoint.object_collectives import by_first, rank, run_on_all_ranks

ALIGNED = 64  # bytes: alignment of every tensor in the staged data, for vector instructions
SPARE = 0.8  # share of the free memory that copies may take
# Names, boxes and dtypes that a process holds. While they are equal, a plan stays valid.
Signature = tuple[tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...], torch.dtype], ...]


@dataclass(frozen=True)
class Item:
    """A box of a tensor that this process writes.

    Attributes:
        name, shape: name and shape of the whole tensor.
        offsets, sizes: offsets and sizes of the box in it.
        at: start of its bytes in the staged data.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    at: int

    @property
    def length(self) -> int:
        """Size of the box in bytes."""
        return torch.Size(self.sizes).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class WritePlan:
    """Assignment of boxes to processes and files.

    Attributes:
        group: unique name of this plan.
        signature: signature of what this process held.
        world: number of processes.
        items: boxes that this process writes, in the order of the staged data.
        length: bytes of the staged data.
        file_layout: layout of this process' file.
        metadata: metadata file of the whole checkpoint; empty but on rank 0.
        size: bytes of the whole checkpoint, without its metadata.
        slots: copies of the staged data that fit into the machine's memory, at most two.
    """

    group: str
    signature: Signature
    world: int
    items: tuple[Item, ...]
    length: int
    file_layout: DcpFileLayout
    metadata: bytes
    size: int
    slots: int


def signature_of(held: Held) -> Signature:
    """Returns the names, boxes and dtypes that a process holds."""
    return tuple(
        (name, chunk.shape, chunk.offsets, tuple(chunk.tensor.shape), chunk.tensor.dtype)
        for name, (chunk, *_) in held.items()
    )


def make_write_plan(held: Held, place: Path | None) -> WritePlan:
    """Assigns boxes to processes and files. A collective.

    Args:
        place: parent folder of the copies in this machine's memory, where files of earlier processes of the run will be
            replaced. None if no copies are made.

    Raises:
        ValueError: the boxes of the processes overlap or leave a gap: a bug of a layout.
    """
    signature = signature_of(held)
    planner = ChunkSaver()
    planner.set_up_planner(dict(held))
    plans = run_on_all_ranks(planner.create_local_plan)
    decided: tuple[list[SavePlan], Metadata] = by_first(lambda: planner.create_global_plan(plans))
    written, metadata = decided
    items = _items(written[rank()].items, held)
    length = items[-1].at + items[-1].length if items else 0
    file_layout, places = _file_layout(f"__{rank()}_0.distcp", items)
    facts = run_on_all_ranks(
        lambda: _RankFacts(
            socket.gethostname(), file_layout.size, length, *_room(place, len(plans)), places, uuid.uuid4().hex[:8]
        )
    )
    return WritePlan(
        group=facts[0].group,
        signature=signature,
        world=len(plans),
        items=items,
        length=length,
        file_layout=file_layout,
        metadata=_metadata_file(metadata, [other.places for other in facts]) if rank() == 0 else b"",
        size=sum(other.size for other in facts),
        slots=min(_slots(other.machine, facts) for other in facts),
    )


@dataclass(frozen=True)
class _RankFacts:
    """Message of a process to the others.

    Attributes:
        machine: its host.
        size, length: bytes that it writes, and that it copies.
        free: bytes that copies may take.
        kept: bytes that its own copies take already.
        former: bytes on its machine that copies of ranks of a larger world take, which its first copy replaces.
    """

    machine: str
    size: int
    length: int
    free: int
    kept: int
    former: int
    places: dict[MetadataIndex, _StorageInfo]
    group: str


def _items(written: Sequence[WriteItem], held: Held) -> tuple[Item, ...]:
    items = []
    at = 0
    for item in written:
        chunk = held[item.index.fqn][0]
        items.append(
            Item(item.index.fqn, chunk.shape, chunk.tensor.dtype, chunk.offsets, tuple(chunk.tensor.shape), at)
        )
        at += -(-items[-1].length // ALIGNED) * ALIGNED
    return tuple(items)


def _room(place: Path | None, world: int) -> tuple[int, int, int]:
    """Returns `_RankFacts.free`, `_RankFacts.kept` and `_RankFacts.former`."""
    if place is None:
        return 0, 0, 0
    system = os.statvfs(place.parent)  # something may have removed the folder itself
    free = int(SPARE * min(system.f_bavail * system.f_frsize, psutil.virtual_memory().available))
    kept = former = 0
    for path in place.glob("rank-*/slot-?"):
        with suppress(FileNotFoundError):  # another process removes it
            number = int(path.parent.name.removeprefix("rank-"))
            kept += path.stat().st_size * (number == rank())
            former += path.stat().st_size * (number >= world)
    return free, kept, former


def _slots(machine: str, facts: Sequence[_RankFacts]) -> int:
    """Returns the number of copies that fit into the memory of one machine."""
    here = [other for other in facts if other.machine == machine]
    wanted = sum(other.length for other in here)
    free, kept = min(other.free for other in here), sum(other.kept for other in here)
    room = free + kept
    if free + kept // 2 >= wanted:  # there is room for the first copy, which replaces one of two
        room += max(other.former for other in here)
    return min(2, room // wanted) if wanted else 2


# -- files as torch.distributed.checkpoint writes them --------------------------------------------------------------


class _Record(io.RawIOBase):
    """A file that records what is written to it, except the bytes of a tensor."""

    def __init__(self) -> None:
        self.written = bytearray()
        self.gap: int | None = None

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        before = len(self.written)
        self.written += data
        return len(self.written) - before

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        assert whence == os.SEEK_CUR and self.gap is None
        self.gap = len(self.written)
        return self.gap + offset


@lru_cache(maxsize=4096)
def _archive(sizes: tuple[int, ...], dtype: torch.dtype) -> tuple[bytes, bytes]:
    """Returns the bytes that `torch.save` writes before and after a tensor's data."""
    record = _Record()
    with skip_data():
        torch.save(torch.empty(sizes, dtype=dtype), cast(IO[bytes], record))  # memory that is never touched
    gap = len(record.written) if record.gap is None else record.gap
    return bytes(record.written[:gap]), bytes(record.written[gap:])


def _file_layout(name: str, items: Sequence[Item]) -> tuple[DcpFileLayout, dict[MetadataIndex, _StorageInfo]]:
    """Returns the layout of a file with one archive per tensor, and the place of each tensor in it."""
    parts, places = [], {}
    words = bytearray()
    since, offset = 0, 0
    for item in items:
        head, tail = _archive(item.sizes, item.dtype)
        words += head + tail
        since += len(head)
        if item.length:
            parts.append(DcpFilePart(since, item.at, item.length))
            since = 0
        since += len(tail)
        length = len(head) + item.length + len(tail)
        places[MetadataIndex(item.name, item.offsets)] = _StorageInfo(name, offset, length)
        offset += length
    return DcpFileLayout(name, tuple(parts), bytes(words)), places


def _metadata_file(metadata: Metadata, places: Iterable[Mapping[MetadataIndex, _StorageInfo]]) -> bytes:
    metadata.storage_data = {index: place for found in places for index, place in found.items()}
    metadata.storage_meta, metadata.version = StorageMeta(), CURRENT_DCP_VERSION
    return pickle.dumps(metadata)


def is_plan_valid(plan: WritePlan | None, held: Held, *, intact: bool) -> bool:
    """Returns whether a plan is still valid, on all processes. A collective.

    Args:
        intact: whether this process still has all the files that were made for it.
    """
    same = intact and plan is not None and plan.signature == signature_of(held)
    if not dist.is_initialized():
        return same
    changed = torch.tensor(0 if same else 1)
    dist.all_reduce(changed, op=dist.ReduceOp.MAX)
    return not changed.item()
