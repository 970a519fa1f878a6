"""The active packed row: its segments, and the processes that share it.

Shapes: B batch (1 when packed), T tokens, H query heads, G key-value heads, K head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from stoker.models.attention.collate import Inputs, Segment
from stoker.models.attention.paged_rows import PagedRows
from stoker.models.attention.varlen_index import QuerySpan, VarlenIndex, varlen_index


class AcrossRow(Protocol):
    """Processes that share a packed row."""

    @property
    def is_first(self) -> bool: ...

    def total(self, x: Tensor) -> Tensor:
        """Returns the sum over the processes; gradients flow to every addend."""

    def stretches(self, segments: Sequence[Segment]) -> list[QuerySpan]:
        """Returns the queries of this process, in the order of `enter`."""

    def enter(self, q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Maps this process' tokens to its queries, and the keys and values of the whole row."""

    def leave(self, out_BHTK: Tensor) -> Tensor:
        """Maps the outputs of its queries to this process' tokens."""

    def heads(self, count: int) -> slice:
        """Returns the query heads of this process."""


@dataclass(frozen=True)
class PackedRow:
    """A row and the masks of its segments, made in the first layer and used in all.

    Attributes:
        index: for kernels that take a whole row; None if attention goes segment by segment, as on a CPU.
    """

    segments: tuple[Segment, ...]
    across: AcrossRow | None
    stretches: Sequence[QuerySpan]
    index: VarlenIndex | None = None
    masks: dict[tuple[object, ...], Any] = field(default_factory=dict)


# The active rows, the innermost last. A list and not a context variable: on a GPU the backward pass, in which recompute
# repeats attention, runs in autograd's own threads, which do not see the context.
_rows: list[PackedRow | PagedRows | None] = [None]


@contextmanager
def segments(
    layout: Sequence[Segment] | None, across: AcrossRow | None = None, device: torch.device | None = None
) -> Iterator[None]:
    """Sets the segments of the row, and the processes that share it, within the block.

    Args:
        device: of the row; by default the CPU.
    """
    with within(None if layout is None else _packed_row(layout, across, device)):
        yield


def _packed_row(layout: Sequence[Segment], across: AcrossRow | None, device: torch.device | None) -> PackedRow:
    whole = [QuerySpan(i, 0, s.length) for i, s in enumerate(layout)]
    runs = whole if across is None else across.stretches(layout)
    index = None
    if device is not None and takes_whole_rows(device) and runs:
        index = varlen_index(layout, runs, device)
    return PackedRow(tuple(layout), across, runs, index)


@torch.compiler.disable  # the documents differ from row to row
def in_chunks(row: PackedRow, size: int) -> PackedRow:
    """Returns the row with its documents cut at multiples of ``size`` tokens, so that no query sees another chunk."""
    if all(s.prefix_length + s.length <= size for s in row.segments):
        return row
    if ("chunks", size) not in row.masks:
        device = None if row.index is None else row.index.query_bounds.device
        row.masks["chunks", size] = _packed_row(list(_chunks(row.segments, size)), row.across, device)
    cut: PackedRow = row.masks["chunks", size]
    return cut


def _chunks(layout: Sequence[Segment], size: int) -> Iterator[Segment]:
    """Yields the chunks of segments; the chunk in which a prefix ends continues in the segments behind it."""
    for s in layout:
        first, end = s.prefix_length, s.prefix_length + s.length  # positions in the document
        for begin in (first, *range((first // size + 1) * size, end, size)):
            stop, before = min((begin // size + 1) * size, end), begin % size
            start = s.start + begin - first
            yield Segment(start, stop - begin, s.prefix_start + first - before if before else 0, before)


def row_of(inputs: Inputs) -> AbstractContextManager[None]:
    """Sets the row of a forward pass within the block; none for padded inputs."""
    return segments(inputs.segments, inputs.across, inputs.ids.device)


def takes_whole_rows(device: torch.device) -> bool:
    """Returns whether attention over a whole row is faster than per segment: where launching kernels is the limit."""
    return device.type == "cuda"


def current_row() -> AbstractContextManager[None]:
    """Captures the current row, and sets it again where the context is entered: recompute does in the backward pass."""
    return within(_rows[-1])


@contextmanager
def within(row: PackedRow | PagedRows | None) -> Iterator[None]:
    """Sets what attention reads within the block."""
    _rows.append(row)
    try:
        yield
    finally:
        _rows.pop()


def active_row() -> PackedRow | PagedRows | None:
    """Returns what attention reads, which masks come from; None outside of `within` and `segments`."""
    return _rows[-1]
