"""Storage of rows and their optimizer state in memory, by row number."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from stoker.sparse.id_index import lengthened_copy


class MemoryRows:
    """Two matrices, one row for each number. Row 0 is zero.

    Args:
        columns, dtype: of stored values.
        state_columns, state_dtype: of the optimizer's state.
    """

    def __init__(self, columns: int, dtype: torch.dtype, state_columns: int, state_dtype: torch.dtype) -> None:
        self._values = torch.zeros(1024, columns, dtype=dtype).numpy()
        self._state = torch.zeros(1024, state_columns, dtype=state_dtype).numpy()

    @property
    def matrices(self) -> tuple[np.ndarray, np.ndarray]:
        """Stored values and optimizer state by row number, for in-place updates."""
        return self._values, self._state

    @property
    def bytes(self) -> int:
        """Memory of values and state in bytes."""
        return self._values.nbytes + self._state.nbytes

    def reserve(self, top: int) -> None:
        """Reserves memory for rows below ``top``."""
        if top > len(self._values):
            size = max(top, len(self._values) * 3 // 2)
            self._values, self._state = lengthened_copy(self._values, size), lengthened_copy(self._state, size)

    def values(self, rows: np.ndarray) -> Tensor:
        """Returns a copy of stored values [n, columns]; rows may repeat."""
        return torch.from_numpy(np.take(self._values, rows, axis=0))

    def state(self, rows: np.ndarray) -> Tensor:
        """Returns a copy of the optimizer's state [n, state_columns]."""
        return torch.from_numpy(np.take(self._state, rows, axis=0))

    def write(self, rows: np.ndarray, values: Tensor, state: Tensor) -> None:
        """Stores values and state of unique rows."""
        for stored, new in ((self._values, values), (self._state, state)):
            if new.shape[1]:
                np.put(_whole_rows(stored), rows, _whole_rows(new.contiguous().numpy()))

    def free(self, rows: np.ndarray) -> None:
        """Frees rows; they are not read again before they are written."""


def _whole_rows(matrix: np.ndarray) -> np.ndarray:
    """Returns a view in which a row is one element, which is copied several times faster than a row of elements."""
    return matrix.view(f"V{matrix.shape[1] * matrix.itemsize}")[:, 0]
