"""In-memory copies of a process' part of the training state, in shared-memory files that outlive the process.

``rank-<rank>/slot-<number>`` holds the bytes, and ``slot-<number>.json`` beside it their description. The latter is
removed before the bytes change and reappears, atomically, after them: a copy with such a file is complete.
"""

from __future__ import annotations

import json
import mmap
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stoker.checkpoint.chunks import Held
from stoker.checkpoint.save_plan import Item, WritePlan
from stoker.parallel.offload.page_locked import lock_pages


@dataclass(frozen=True)
class Copy:
    """A complete in-memory copy of a process' part of the training state after a step.

    Attributes:
        data: file of its bytes.
        group: group of the `WritePlan` that it was made under.
        numbers: as in `stoker.checkpoint.state.State`.
    """

    data: Path
    step: int
    group: str
    rank: int
    world: int
    items: tuple[Item, ...]
    numbers: Mapping[str, Any]

    def tensors(self) -> Iterator[tuple[Item, Tensor]]:
        """Yields the boxes, mapped from the file read-only."""
        if not any(item.length for item in self.items):
            data = torch.empty(0, dtype=torch.uint8)
        else:
            data = torch.from_file(str(self.data), shared=False, size=self.data.stat().st_size, dtype=torch.uint8)
        for item in self.items:
            yield item, _box(data, item)


class Slot:
    """Memory for one copy, mapped into this process."""

    def __init__(self, folder: Path, number: int) -> None:
        self.path = folder / f"slot-{number}"
        self.header = folder / f"slot-{number}.json"
        self._step: int | None = None
        self._map: mmap.mmap | None = None
        self._boxes: list[Tensor] = []
        self._file: tuple[int, int] | None = None
        self.group = ""
        self._items = ""
        self._unlock: Callable[[], None] | None = None

    @property
    def step(self) -> int:
        """Step of the copy in it; -1 if there is none."""
        if self._step is None:
            copy = read_copy(self.header)
            self._step = copy.step if copy else -1
        return self._step

    def is_there(self) -> bool:
        """Returns whether other processes can find the last copy; also True if none was made yet."""
        return not self.group or _identity(self.path) == self._file

    def forget_step(self) -> None:
        """Invalidates the cached step, as another process may have removed the copy."""
        self._step = None

    def fill(self, step: int, held: Held, numbers: Mapping[str, Any], plan: WritePlan, *, rank: int) -> float:
        """Copies the boxes that this process writes.

        Returns:
            Seconds that the copy took, after the allocation.

        Raises:
            OSError: the memory is full.
        """
        self.header.unlink(missing_ok=True)
        self._step = -1
        if self.group != plan.group:
            self._make_room(plan)
        begin = time.perf_counter()
        devices = set()
        for item, box in zip(plan.items, self._boxes, strict=True):
            tensor = held[item.name][0].data()
            box.copy_(tensor, non_blocking=True)
            devices.add(tensor.device)
        for device in devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        facts = {"step": step, "group": plan.group, "rank": rank, "world": plan.world, "numbers": numbers}
        partial = self.header.with_suffix(".partial")
        partial.write_text(f'{json.dumps(facts)[:-1]}, "items": {self._items}}}', encoding="utf-8")
        partial.replace(self.header)
        self._step = step
        return time.perf_counter() - begin

    def _make_room(self, plan: WritePlan) -> None:
        """Maps a fully allocated file of the needed size, so that a lack of memory is an error here and not during a
        copy.
        """
        self.close()
        own = self._file is not None and _identity(self.path) == self._file
        if not own or self.path.stat().st_size != plan.length:
            self.path.unlink(missing_ok=True)  # who still reads it, as the writer of a killed process, has it mapped
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
        data = torch.empty(0, dtype=torch.uint8)
        try:
            if plan.length:
                allocate(descriptor, plan.length)
                populate = getattr(mmap, "MAP_POPULATE", 0)
                self._map = mmap.mmap(descriptor, plan.length, flags=mmap.MAP_SHARED | populate)
                data = torch.frombuffer(self._map, dtype=torch.uint8)
        finally:
            os.close(descriptor)
        self._pin(data)
        self._boxes = [_box(data, item) for item in plan.items]
        self._file = _identity(self.path)
        self._items = json.dumps([_plain(item) for item in plan.items])
        self.group = plan.group

    def _pin(self, data: Tensor) -> None:
        """Page-locks the memory if there are GPUs, which copy it several times faster then."""
        if data.numel() and torch.cuda.is_available() and torch.cuda.is_initialized():
            self._unlock = lock_pages(data)

    def empty(self) -> None:
        """Frees the memory and deletes the copy."""
        self.header.unlink(missing_ok=True)
        self.path.unlink(missing_ok=True)
        self.close()

    def close(self) -> None:
        """Unmaps the memory; the copy stays."""
        if self._unlock is not None:
            self._unlock()
            self._unlock = None
        self._boxes = []
        self._map = None  # unmapped with the last tensor over it
        self.group = ""


def read_copy(header: Path) -> Copy | None:
    """Reads the copy described by a header; None if there is none, or its bytes are missing."""
    try:
        kept = json.loads(header.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    items = tuple(
        Item(name, tuple(shape), getattr(torch, dtype), tuple(offsets), tuple(sizes), at)
        for name, shape, dtype, offsets, sizes, at in kept["items"]
    )
    data = header.with_suffix("")
    if not data.exists() or data.stat().st_size < max((item.at + item.length for item in items), default=0):
        return None
    return Copy(
        data=data,
        step=kept["step"],
        group=kept["group"],
        rank=kept["rank"],
        world=kept["world"],
        items=items,
        numbers=kept["numbers"],
    )


def copies_in(folder: Path) -> list[Copy]:
    """Returns all complete copies of a run's processes in this machine's memory."""
    found = [read_copy(header) for header in sorted(folder.glob("rank-*/slot-?.json"))]
    return [copy for copy in found if copy is not None]


def forget_copies(copies: Sequence[Copy]) -> None:
    """Deletes the headers of copies, which makes them invalid."""
    for copy in copies:
        copy.data.with_suffix(".json").unlink(missing_ok=True)


def _identity(path: Path) -> tuple[int, int] | None:
    """Identifies the file at a path; None if there is none."""
    with suppress(FileNotFoundError):
        found = path.stat()
        return found.st_dev, found.st_ino
    return None


def _plain(item: Item) -> tuple[Any, ...]:
    return item.name, item.shape, str(item.dtype).removeprefix("torch."), item.offsets, item.sizes, item.at


def _box(data: Tensor, item: Item) -> Tensor:
    return data[item.at : item.at + item.length].view(item.dtype).view(item.sizes)


def allocate(descriptor: int, length: int) -> None:
    """Allocates a shared-memory file of the needed size completely.

    Raises:
        OSError: there is no room.
    """
    with suppress(AttributeError):  # a system without it
        os.posix_fallocate(descriptor, 0, length)
        return
    os.truncate(descriptor, length)
