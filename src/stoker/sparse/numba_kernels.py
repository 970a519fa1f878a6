"""Kernels over a batch's ids and rows, compiled: one pass each, without temporary arrays. See `array_kernels`.

Machine code is cached beside this file, or in numba's cache folder if this folder is read-only.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numba import njit
from torch import Tensor

from stoker.sparse.index_entry import EMPTY, ROW, ROW_BITS

_AHEAD = 64  # entries that are read before they are compared, so that their cache misses overlap
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)  # constants of `mix64`
_30, _27, _31 = np.uint64(30), np.uint64(27), np.uint64(31)


@njit(cache=True, nogil=True)
def hashes(ids: np.ndarray, tables: np.ndarray, salts: np.ndarray) -> np.ndarray:
    """See `array_kernels.hashes`."""
    found = np.empty(len(ids), np.uint64)
    for i in range(len(ids)):
        x = np.uint64(ids[i]) + salts[tables[i]]
        x = (x ^ (x >> _30)) * _FIRST
        x = (x ^ (x >> _27)) * _SECOND
        found[i] = x ^ (x >> _31)
    return found


@njit(cache=True, nogil=True)
def deduplicate(ids: np.ndarray, tables: np.ndarray, hashes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """See `array_kernels.deduplicate`: open addressing in a hash table that fits in the cache."""
    capacity = 1024
    while capacity < 2 * len(ids):
        capacity *= 2
    mask, one = np.uint64(capacity - 1), np.uint64(1)
    numbers = np.full(capacity, -1, np.int32)
    places, first = np.empty(len(ids), np.int64), np.empty(len(ids), np.int64)
    count = 0
    for i in range(len(ids)):
        at = hashes[i] & mask
        while True:
            number = numbers[at]
            if number < 0:
                numbers[at] = number = count
                first[count] = i
                count += 1
                break
            other = first[number]
            if ids[other] == ids[i] and tables[other] == tables[i]:
                break
            at = (at + one) & mask
        places[i] = number
    return places, first[:count].copy()


@njit(cache=True, nogil=True)
def find(entries: np.ndarray, ids: np.ndarray, tables: np.ndarray, hashes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """See `array_kernels.find`."""
    mask, count = np.int64(len(entries) - 1), len(ids)
    rows, ends = np.empty(count, np.int64), np.empty(count, np.int64)
    ahead = np.empty((_AHEAD, 2), np.int64)
    for begin in range(0, count, _AHEAD):
        end = min(begin + _AHEAD, count)
        for i in range(begin, end):
            at = np.int64(hashes[i]) & mask
            ahead[i - begin, 0], ahead[i - begin, 1] = entries[at, 0], entries[at, 1]
        for i in range(begin, end):
            at, step = np.int64(hashes[i]) & mask, 0
            own, number = ahead[i - begin, 0], ahead[i - begin, 1]
            while number != EMPTY and (own != ids[i] or number >> ROW_BITS != tables[i]):
                step += 1
                at = (at + step) & mask
                own, number = entries[at, 0], entries[at, 1]
            rows[i] = 0 if number == EMPTY else number & ROW
            ends[i] = at
    return rows, ends


def sum_bags(
    at: Tensor,
    count: int,
    grads: Sequence[Tensor | None],
    sizes: Sequence[int],
    lengths: Tensor | None,
    weights: Tensor | None,
    like: Tensor,
) -> Tensor:
    """See `array_kernels.sum_bags`: reads the gradients feature by feature, without concatenating them."""
    total = like.new_zeros(count, like.shape[1])
    rows, sums, begin, bag = at.numpy(), total.numpy(), 0, 0
    for grad, size in zip(grads, sizes, strict=True):
        if lengths is None:
            end = begin + size
            if grad is not None:
                _add_rows(sums, rows[begin:end], grad.numpy())
        else:
            own = lengths[bag : bag + size].numpy()
            end = begin + int(own.sum())
            if grad is not None:
                factors = np.ones(end - begin, sums.dtype) if weights is None else weights[begin:end].numpy()
                _add_bags(sums, rows[begin:end], grad.numpy(), own, factors)
        begin, bag = end, bag + size
    return total


@njit(cache=True, nogil=True)
def _add_rows(sums: np.ndarray, rows: np.ndarray, grads: np.ndarray) -> None:
    for i in range(len(rows)):
        row = rows[i]
        for k in range(sums.shape[1]):
            sums[row, k] += grads[i, k]


@njit(cache=True, nogil=True)
def _add_bags(sums: np.ndarray, rows: np.ndarray, grads: np.ndarray, lengths: np.ndarray, factors: np.ndarray) -> None:
    i = 0
    for bag in range(len(lengths)):
        for _ in range(lengths[bag]):
            for k in range(sums.shape[1]):
                sums[rows[i], k] += factors[i] * grads[bag, k]
            i += 1


def rowwise_adagrad(
    values: np.ndarray, state: np.ndarray, rows: np.ndarray, grads: Tensor, *, lr: float, eps: float
) -> None:
    """Updates rows of a table in place, as `row_optimizers._rowwise_adagrad`.

    Args:
        values: [rows of the table, width]; updated in place.
        state: [rows of the table, 1]; updated in place.
        rows: int64 [n], unique.
        grads: [n, width].
    """
    number = values.dtype.type
    _rowwise_adagrad(values, state, rows, grads.contiguous().numpy(), number(lr), number(eps))


@njit(cache=True, nogil=True)
def _rowwise_adagrad(
    values: np.ndarray, state: np.ndarray, rows: np.ndarray, grads: np.ndarray, lr: float, eps: float
) -> None:
    width = values.shape[1]
    for i in range(len(rows)):
        row, square = rows[i], 0.0
        for k in range(width):
            square += grads[i, k] * grads[i, k]
        state[row, 0] += square / width
        factor = lr / (np.sqrt(state[row, 0]) + eps)
        for k in range(width):
            values[row, k] -= grads[i, k] * factor


IN_PLACE = {"rowwise_adagrad": rowwise_adagrad}
