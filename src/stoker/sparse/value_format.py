"""Storage formats of a row's values: float64, float32, float16, or int8 with a scale for each row."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from stoker.sparse.table_settings import Dtype

_DROPPED_BITS = 13  # mantissa bits of float32 that float16 does not have
_SCALE_BYTES = 4  # a float32 behind the int8 values
_LARGEST_HALF = 65504.0
_SMALLEST_NORMAL, _UNIT = 2.0**-14, 2.0**-24  # below the first, float16 has the multiples of the second
_STORED = {"float64": torch.float64, "float32": torch.float32, "float16": torch.float16, "int8": torch.int8}


@dataclass(frozen=True)
class RowFormat:
    """Converts rows between arithmetic and storage.

    Attributes:
        dtype: of the stored values.
        width: numbers a row.
    """

    dtype: Dtype
    width: int

    @property
    def compute(self) -> torch.dtype:
        """The type of arithmetic."""
        return torch.float64 if self.dtype == "float64" else torch.float32

    @property
    def stored(self) -> torch.dtype:
        """The type of stored rows."""
        return _STORED[self.dtype]

    @property
    def columns(self) -> int:
        """Elements of a stored row; int8 rows end in the four bytes of their scale."""
        return self.width + (_SCALE_BYTES if self.dtype == "int8" else 0)

    @property
    def rounds(self) -> bool:
        """Whether updates are rounded, so that `encode` needs noise."""
        return self.dtype in ("float16", "int8")

    def decode(self, stored: Tensor) -> Tensor:
        """Converts stored rows [n, columns] to values [n, width]."""
        if self.dtype == "int8":
            scale = torch.from_numpy(
                stored.numpy()[:, self.width :].copy().view(np.float32)
            )  # torch views no empty one
            return stored[:, : self.width].to(torch.float32) * scale
        return stored.to(self.compute)

    def encode(self, values: Tensor, noise: np.ndarray | None = None) -> Tensor:
        """Converts values [n, width] to stored rows [n, columns].

        Args:
            noise: float64 [n, width] in [0, 1) for stochastic rounding, whose expectation is the value (Gupta et al.,
                2015): an update smaller than half a unit in the last place is not always lost. To nearest without it.
        """
        if not self.rounds:
            return values
        if self.dtype == "float16":
            values = values.clamp(-_LARGEST_HALF, _LARGEST_HALF)
            if noise is not None:
                added = torch.from_numpy((noise * 2**_DROPPED_BITS).astype(np.int32))
                bits = (values.contiguous().view(torch.int32) + added) & ~(2**_DROPPED_BITS - 1)
                fixed = (values.double() / _UNIT + torch.from_numpy(noise)).floor().float() * _UNIT
                values = torch.where(values.abs() < _SMALLEST_NORMAL, fixed, bits.view(torch.float32))
                values = values.clamp(-_LARGEST_HALF, _LARGEST_HALF)
            return values.to(torch.float16)
        scale = values.abs().amax(1, keepdim=True) / 127
        share = values / torch.where(scale > 0, scale, 1.0)
        whole = share.round() if noise is None else (share + torch.from_numpy(noise).to(torch.float32)).floor()
        coded = whole.clamp(-127, 127).to(torch.int8)
        return torch.cat([coded, torch.from_numpy(scale.contiguous().numpy().view(np.int8))], dim=1)
