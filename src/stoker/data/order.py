"""The order of the data: a pure function of (seed, epoch, index).

The order is stored neither in memory nor in a checkpoint: any number of processes, at any batch size, after any
resume, computes the same one.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from stoker.splitmix64 import GOLDEN, mix64

_ROUNDS = 6


def stream_key(*parts: int) -> int:
    """Hashes several integers, such as (seed, source, epoch), to one 64-bit key."""
    state = np.zeros(1, np.uint64)
    with np.errstate(over="ignore"):
        for part in parts:
            state = mix64((state ^ np.uint64(part & 0xFFFFFFFFFFFFFFFF)) * GOLDEN + GOLDEN)
    return int(state[0])


@lru_cache(maxsize=256)
def _round_keys(key: int) -> tuple[np.uint64, ...]:
    return tuple(np.uint64(stream_key(key, r)) for r in range(_ROUNDS))


def permute(indices: np.ndarray | int, size: int, key: int) -> np.ndarray:
    """Maps each index to its position in a keyed shuffle of ``range(size)``: a bijection, without a table.

    A balanced Feistel network over the next even power of two, walked in cycles until the value falls inside
    the range (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002).

    Args:
        indices: integers in [0, size), any shape.
        size: number of shuffled elements.
        key: the shuffle's key, from `stream_key`.
    """
    x = np.atleast_1d(np.asarray(indices)).astype(np.uint64)
    if x.size and (int(x.max()) >= size):
        raise IndexError(f"index {int(x.max())} is outside a permutation of {size}")
    half_bits = max(1, ((max(size, 2) - 1).bit_length() + 1) // 2)
    mask = np.uint64((1 << half_bits) - 1)
    shift = np.uint64(half_bits)
    round_keys = _round_keys(key)

    def encrypt(v: np.ndarray) -> np.ndarray:
        left, right = v >> shift, v & mask
        for k in round_keys:
            left, right = right, left ^ (mix64(right * GOLDEN + k) & mask)
        return (left << shift) | right

    with np.errstate(over="ignore"):
        out = encrypt(x)
        outside = out >= size
        while outside.any():
            out[outside] = encrypt(out[outside])
            outside = out >= size
    return out.astype(np.int64)
