"""The keys of each query of a packed row, as index tensors for kernels that take a whole row at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from stoker.hardware.process_device import is_nvidia, on_device
from stoker.models.attention.collate import Segment
from stoker.models.attention.even_rows import even_rows

FLASH_FROM = (8, 0)  # compute capability of the first GPUs with flash attention: Ampere


@dataclass(frozen=True)
class QuerySpan:
    """``length`` consecutive queries of a segment, from its ``first`` token on."""

    segment: int
    first: int
    length: int


@dataclass(frozen=True)
class VarlenIndex:
    """An index of N runs of queries in order, with Q queries and S keys in all.

    Attributes:
        query_bounds, key_bounds: cumulative lengths, int32, shape (N + 1,). A run's queries are its last keys.
        longest_queries, longest_keys: of one run.
        keys: positions in the row of the runs' keys, shape (S,); None if they are all positions of the row in order.
        flash: whether this device has flash attention.
        even: length of the documents if the row is computed as a batch of them; see `even_rows`.
    """

    query_bounds: Tensor
    key_bounds: Tensor
    longest_queries: int
    longest_keys: int
    keys: Tensor | None
    flash: bool
    even: int | None = None


def varlen_index(segments: Sequence[Segment], runs: Sequence[QuerySpan], device: torch.device) -> VarlenIndex:
    """Builds the index of a row on a device.

    Args:
        runs: the queries, in the order in which they are passed to the kernel.
    """
    keys = []
    for run in runs:
        s = segments[run.segment]
        keys.append(np.arange(s.prefix_start, s.prefix_start + s.prefix_length))
        keys.append(np.arange(s.start, s.start + run.first + run.length))
    places = np.concatenate(keys)
    tokens = sum(s.length for s in segments)
    as_it_is = len(places) == tokens and bool((places == np.arange(tokens)).all())
    queries = [run.length for run in runs]
    seen = [segments[run.segment].prefix_length + run.first + run.length for run in runs]
    even = as_it_is and queries == seen and len(set(queries)) == 1 and even_rows.admit(len(queries), queries[0])
    return VarlenIndex(
        _bounds(queries, device),
        _bounds(seen, device),
        max(queries),
        max(seen),
        None if as_it_is else on_device(places, device),
        _has_flash(device),
        queries[0] if even else None,
    )


def _bounds(lengths: Sequence[int], device: torch.device) -> Tensor:
    return on_device(np.cumsum([0, *lengths], dtype=np.int32), device)


@cache
def _has_flash(device: torch.device) -> bool:
    # AMD's GPUs state capabilities of 9 and more, and torch's kernel exists for some of them only.
    return is_nvidia(device) and torch.cuda.get_device_capability(device) >= FLASH_FROM
