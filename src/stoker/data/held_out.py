"""Selects the rows held out for evaluation, by their content."""

from __future__ import annotations

import numpy as np

from stoker.data.order import permute, stream_key


def hold_out(digests: np.ndarray, fraction: float) -> np.ndarray:
    """Returns a mask of the rows held out for evaluation: about ``fraction`` of them, at least one where possible.

    Rows are chosen by their content: equal rows fall on the same side, so no copy of a held-out row is trained on.
    Contents too frequent to fit into the fraction stay in training.

    Args:
        digests: digest of each row, shape (rows,).
        fraction: between 0 and 1.
    """
    none = np.zeros(len(digests), dtype=bool)
    if fraction <= 0 or len(digests) < 2:
        return none
    contents, row_of, times = np.unique(digests, return_inverse=True, return_counts=True)
    if len(contents) < 2:
        return none
    scrambled = permute(contents % (1 << 32), 1 << 32, stream_key(0x5EED))
    order = np.lexsort((contents, scrambled))
    wanted = min(len(digests) - 1, max(1, round(fraction * len(digests)), int(times.min())))
    order = order[times[order] <= wanted]
    chosen = np.zeros(len(contents), dtype=bool)
    chosen[order[np.cumsum(times[order]) <= wanted]] = True
    mask = chosen[row_of]
    return none if mask.all() else mask
