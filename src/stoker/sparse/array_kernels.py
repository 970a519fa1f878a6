"""Vectorised kernels over a batch's ids and rows, in NumPy and torch: the reference of `numba_kernels`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from stoker.sparse.hashing import hashes_of
from stoker.sparse.index_entry import EMPTY, ROW_BITS, ROWS
from stoker.splitmix64 import GOLDEN, mix64

# in-place updates of rows by name of the optimizer; see `numba_kernels.rowwise_adagrad`
IN_PLACE: dict[str, Callable[..., None]] = {}


def hashes(ids: np.ndarray, tables: np.ndarray, salts: np.ndarray) -> np.ndarray:
    """Hashes ids with the salts of their tables, by `hashes_of`; returns uint64 [n].

    Args:
        ids: int64 [n].
        tables: int64 [n].
        salts: uint64 [tables].
    """
    return hashes_of(ids, salts[tables] if len(salts) > 1 else salts[0])


def deduplicate(ids: np.ndarray, tables: np.ndarray, hashes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns each key's index among the unique ones, int64 [n], and the unique keys' first positions, int64 [u].

    All keys claim slots by their hashes at once. The first key at a slot gets it, and represents all keys equal to it;
    the others claim again by new hashes. As equal keys have equal hashes, the result is exact.
    """
    count = len(ids)
    representatives = np.empty(count, np.int64)  # for each key the index of its representative
    claims = np.empty(1 << max(10, (4 * count).bit_length()), np.int32)
    mask = np.uint64(len(claims) - 1)
    left = np.arange(count)
    while len(left):
        places = (hashes & mask).view(np.int64)
        claims[places[::-1]] = left[::-1]  # the last of several assignments wins
        holders = np.take(claims, places)
        same = ids[holders] == ids[left]
        same &= tables[holders] == tables[left]
        representatives[left[same]] = holders[same]
        other = np.flatnonzero(~same)
        left, hashes = left[other], mix64(hashes[other] + GOLDEN)
    first = np.flatnonzero(representatives == np.arange(count))
    numbers = np.empty(count, np.int64)
    numbers[first] = np.arange(len(first))
    return np.take(numbers, representatives), first


def find(entries: np.ndarray, ids: np.ndarray, tables: np.ndarray, hashes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns row numbers of keys, 0 for absent ones, and the entries at which the searches ended, int64 [n] each.

    Each iteration probes once for all keys that are not found yet.

    Args:
        entries: int64 [capacity, 2], entries of `IdIndex`.
        ids, tables, hashes: attributes of the keys; see `Keys`.
    """
    whole = entries.view(np.complex128)[:, 0]  # 16 bytes that are copied as one
    mask = np.int64(len(entries) - 1)
    at = hashes.view(np.int64) & mask
    wanted = tables << ROW_BITS
    rows, going = _compare(whole, at, ids, wanted)
    step = 0
    while len(going):
        step += 1
        place = (at[going] + step) & mask
        at[going] = place
        found, still = _compare(whole, place, ids[going], wanted[going])
        rows[going] = found
        going = going[still]
    return rows, at


def _compare(whole: np.ndarray, at: np.ndarray, ids: np.ndarray, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the rows found at entries, and the indices of entries with another id."""
    pairs = np.take(whole, at).view(np.int64).reshape(-1, 2)
    other = pairs[:, 1]
    rows = other - wanted
    hit = rows.view(np.uint64) < ROWS
    hit &= pairs[:, 0] == ids
    rows *= hit
    return rows, np.flatnonzero((other != EMPTY) & ~hit)


def sum_bags(
    at: Tensor,
    count: int,
    grads: Sequence[Tensor | None],
    sizes: Sequence[int],
    lengths: Tensor | None,
    weights: Tensor | None,
    like: Tensor,
) -> Tensor:
    """Returns the gradient of rows from the gradients of bags: for each row the sum over its occurrences, in order.

    Args:
        at: int64 [n], the row of each id.
        count: number of rows.
        grads: gradients of the features, [bags, width] each; None for features without one.
        sizes: number of bags of each feature.
        lengths: int64 [bags], number of ids in each bag; None for 1.
        weights: [n], weight of each id; None for 1.
        like: tensor with the width and dtype of the result.
    """
    parts = [
        like.new_zeros(size, like.shape[1]) if grad is None else grad for grad, size in zip(grads, sizes, strict=True)
    ]
    order = _order(at, count)
    sources = order if lengths is None else torch.repeat_interleave(lengths)[order]
    if not len(at):
        return like.new_zeros(count, like.shape[1])
    offsets = torch.bincount(at, minlength=count)
    factors = None if weights is None else weights[order]
    return F.embedding_bag(
        sources, torch.cat(parts), offsets.cumsum(0) - offsets, mode="sum", per_sample_weights=factors
    )


def _order(at: Tensor, count: int) -> Tensor:
    """Returns the stable sorting order of numbers below ``count``, by radix sort if they fit in 16 bits."""
    if count <= 2**16:
        return torch.from_numpy(np.argsort(at.numpy().astype(np.uint16), kind="stable"))
    return torch.sort(at.to(torch.int32), stable=True)[1]
