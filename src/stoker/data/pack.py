"""Packs several documents into one sequence, to leave little padding.

Packing is a pure function of the order and the lengths: the draws are taken in windows, and each window is
packed by itself with best-fit decreasing (Johnson, 1973). A window never depends on another one, so a
resumed run packs the same sequences.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np

from stoker.data.order import permute, stream_key

WINDOW = 1024  # draws packed together: at a mean of a fifth of the capacity this leaves about 1 % empty


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Returns bins of indices into ``lengths`` with no bin above ``capacity``, by best-fit decreasing.

    Raises:
        ValueError: when a length is above the capacity; such rows are cut or split before.
    """
    bins: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (room left, bin), sorted
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[index]
        if length > capacity:
            raise ValueError(f"a document of {length} tokens does not fit a sequence of {capacity}")
        place = bisect_left(free, (length, -1))
        if place < len(free):
            room, number = free.pop(place)
            bins[number].append(index)
        else:
            room, number = capacity, len(bins)
            bins.append([index])
        if room > length:
            insort(free, (room - length, number))
    return bins


def pack_window(lengths: Sequence[int], capacity: int, key: int) -> list[list[int]]:
    """Packs one window into sequences, in a shuffled order, so that full and half-empty ones are mixed."""
    bins = best_fit(lengths, capacity)
    order = permute(np.arange(len(bins)), len(bins), stream_key(key))
    return [sorted(bins[int(i)]) for i in order]
