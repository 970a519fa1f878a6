"""SplitMix64, a generator and hash of 64-bit numbers (Steele, Lea and Flood, 2014)."""

from __future__ import annotations

import numpy as np

GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2^64 divided by the golden ratio: the increment of the generator's state


def mix64(x: np.ndarray) -> np.ndarray:
    """Mixes the bits of an array of uint64, in place, and returns it.

    This is the generator's finaliser: a bijection, in which each input bit changes about half of the output.
    """
    scratch = x >> np.uint64(30)
    x ^= scratch
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= np.right_shift(x, np.uint64(27), out=scratch)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= np.right_shift(x, np.uint64(31), out=scratch)
    return x
