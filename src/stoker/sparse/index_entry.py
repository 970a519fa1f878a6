"""Format of an entry of `IdIndex`: 16 bytes, so that a probe reads one cache line.

An entry consists of the id, and of a number that packs the table (upper 24 bits) and the row (lower 40 bits).
"""

from __future__ import annotations

import numpy as np

ROW_BITS = 40
ROW = np.int64(2**ROW_BITS - 1)
ROWS = np.uint64(2**ROW_BITS)
EMPTY, DELETED = np.int64(-1), np.int64(-2)  # values of the number for unused entries
