"""Products of experts in the dtype of autocast, which does not reach them (pytorch#174763).

Without it, weights in float32 are multiplied in float32, in one process and under DDP, while every other product is in
16 bits. Under ``fully_shard`` weights are gathered in 16 bits.

Shapes: S tokens of experts, I input width, O output width, E experts.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.integrations import moe

from stoker.models.autocast import autocast_dtype

_grouped_mm = getattr(moe, "_grouped_mm", None)  # an internal name of transformers


def _grouped_mm_under_autocast(input: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    """``input`` (S, I) times each expert's ``weight`` (E, I, O), shape (S, O)."""
    assert _grouped_mm is not None
    dtype = autocast_dtype(weight) or weight.dtype
    found: Tensor = _grouped_mm(input.to(dtype), weight.to(dtype), offs)
    return found


def grouped_product(x_SI: Tensor, weight_EIO: Tensor, ends_E: Tensor) -> Tensor:
    """Multiplies rows, sorted by expert, with their expert's matrix, shape (S, O); for families that do not.

    Args:
        ends_E: the row behind the last of each expert, int32.
    """
    if weight_EIO.dtype == torch.float64:  # for which torch has no such product
        found: Tensor = torch.ops.transformers.grouped_mm_fallback(x_SI, weight_EIO, ends_E)
        return found
    return _grouped_mm_under_autocast(x_SI, weight_EIO, ends_E)


def register() -> None:
    """Has transformers' grouped products follow autocast."""
    if _grouped_mm is not None:
        moe._grouped_mm = _grouped_mm_under_autocast
