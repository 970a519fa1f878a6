"""Products of experts in the dtype of autocast, which does not reach them (pytorch#174763), also of packed ones.

Without it, weights in float32 are multiplied in float32, in one process and under DDP, while every other product is in
16 bits. Under ``fully_shard`` weights are gathered in 16 bits.

Shapes: S tokens of experts, I input width, O output width, E experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.integrations import moe

from stoker.models.autocast import autocast_dtype
from stoker.models.tuning.expert_lora import AdaptedExperts
from stoker.models.tuning.packed_experts import PackedExperts, TransposedExperts

Experts = Tensor | PackedExperts | TransposedExperts | AdaptedExperts
_grouped_mm = getattr(moe, "_grouped_mm", None)  # an internal name of transformers


def _product(x_SI: Tensor, weight_EIO: Tensor, ends_E: Tensor) -> Tensor:
    assert _grouped_mm is not None
    # torch has no such product in float64.
    multiply = torch.ops.transformers.grouped_mm_fallback if weight_EIO.dtype == torch.float64 else _grouped_mm
    y_SO: Tensor = multiply(x_SI, weight_EIO, ends_E)
    return y_SO


class _PackedProduct(torch.autograd.Function):
    """Rows times experts that are unpacked for each product, forward and backward, and not kept between them."""

    @staticmethod
    def forward(ctx: Any, x_SI: Tensor, unpack: Callable[[], Tensor], ends_E: Tensor) -> Tensor:
        ctx.unpack = unpack
        ctx.save_for_backward(ends_E)
        return _product(x_SI, unpack().to(x_SI.dtype), ends_E)

    @staticmethod
    def backward(ctx: Any, grad_SO: Tensor) -> tuple[Tensor | None, ...]:
        (ends_E,) = ctx.saved_tensors
        weight_EOI = ctx.unpack().to(grad_SO.dtype).transpose(-2, -1)
        return _product(grad_SO.contiguous(), weight_EOI, ends_E), None, None


def grouped_product(input: Tensor, weight: Experts, offs: Tensor) -> Tensor:
    """Multiplies rows (S, I), sorted by expert, with their expert's matrix (E, I, O), shape (S, O).

    Args:
        offs: the row behind the last of each expert, int32; the names are those of transformers' function.
    """
    dtype = autocast_dtype(input) or weight.dtype
    if isinstance(weight, AdaptedExperts):
        narrow = grouped_product(input, weight.left.contiguous(), offs) * weight.scaling
        return grouped_product(input, weight.weight, offs) + grouped_product(narrow, weight.right.contiguous(), offs)
    if not isinstance(weight, Tensor):
        product: Tensor = _PackedProduct.apply(input.to(dtype), weight.unpack, offs)
        return product
    return _product(input.to(dtype), weight.to(dtype), offs)


def register() -> None:
    """Has transformers' grouped products follow autocast."""
    if _grouped_mm is not None:
        moe._grouped_mm = grouped_product
