"""Products of experts in the dtype of autocast, which does not reach them (pytorch#174763).

Without it, weights in float32 are multiplied in float32, in one process and under DDP, while every other product is in
16 bits. Under ``fully_shard`` weights are gathered in 16 bits.

Shapes: S tokens of experts, I input width, O output width, E experts.
"""

from __future__ import annotations

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


def register() -> None:
    """Has transformers' grouped products follow autocast."""
    if _grouped_mm is not None:
        moe._grouped_mm = _grouped_mm_under_autocast
