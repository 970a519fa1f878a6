"""64-bit hashes of ids, vectorised over arrays.

The hash of an id is `mix64`, a bijection, so that different ids of one table never have the same hash.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np

from stoker.splitmix64 import GOLDEN, mix64

BUCKETS = 4096  # parts of the ids; a process owns whole ones
_BUCKET_SHIFT = np.uint64(64 - 12)


def salt_of(*labels: object) -> np.uint64:
    """Returns a 64-bit number for a purpose, such as a table's name."""
    text = "\0".join(str(label) for label in labels)
    return np.uint64(int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little"))


def hashes_of(ids: np.ndarray, salts: np.ndarray | np.uint64) -> np.ndarray:
    """Hashes int64 ids under one salt, or one for each id. Returns uint64 [n]."""
    return mix64(ids.view(np.uint64) + salts)


def buckets_of(hashes: np.ndarray) -> np.ndarray:
    """Returns the part of the ids, out of `BUCKETS`, that each hash is in: its upper bits. int64 [n]."""
    return (hashes >> _BUCKET_SHIFT).view(np.int64)


def owners_of(hashes: np.ndarray, world: int) -> np.ndarray:
    """Returns the process, out of ``world``, that owns each hash. int64 [n]."""
    return buckets_of(hashes) % world


def uniform(hashes: np.ndarray, draws: int) -> np.ndarray:
    """Returns uniform numbers in [0, 1), a function of each hash. float64 [n, draws].

    The state of SplitMix64 starts at the hash, so that draws are its successive outputs.
    """
    steps = np.arange(1, draws + 1, dtype=np.uint64) * GOLDEN
    bits = mix64(hashes[:, None] + steps)
    return (bits >> np.uint64(11)) * 2.0**-53
