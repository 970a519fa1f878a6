"""The ids of one feature, with a variable number per sample."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class JaggedIds:
    """The ids of one feature, sample by sample.

    Attributes:
        ids: int64 [n], the ids of all samples concatenated; every 64-bit value is a valid id.
        lengths: int64 [batch], number of ids of each sample.
        weights: [n], a factor for each id; None for 1.

    Raises:
        ValueError: the lengths do not sum to the number of ids, or types or sizes differ from these.
    """

    ids: Tensor
    lengths: Tensor
    weights: Tensor | None = None

    def __post_init__(self) -> None:
        if self.ids.dtype != torch.int64 or self.lengths.dtype != torch.int64:
            raise ValueError(f"ids and lengths are int64, not {self.ids.dtype} and {self.lengths.dtype}")
        if self.ids.dim() != 1 or self.lengths.dim() != 1:
            raise ValueError("ids and lengths have one dimension each")
        lengths = self.lengths.numpy()
        if lengths.sum() != len(self.ids) or lengths.min(initial=0) < 0:
            raise ValueError(f"lengths sum to {lengths.sum()}, and there are {len(self.ids)} ids")
        if self.weights is not None and self.weights.shape != self.ids.shape:
            raise ValueError(f"{len(self.ids)} ids have {self.weights.numel()} weights")

    @classmethod
    def single(cls, ids: Tensor) -> JaggedIds:
        """Wraps one id per sample."""
        return cls(ids, torch.ones_like(ids))
