"""The dtype that autocast gives to a matrix product, for code outside its reach: kernels and custom functions."""

from __future__ import annotations

import torch
from torch import Tensor


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Returns the dtype in which autocast would multiply ``x``; None outside of it, and for float64, which it keeps."""
    kind = x.device.type
    if x.dtype == torch.float64 or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def in_product_dtype(x: Tensor) -> Tensor:
    """Casts to the dtype in which autocast would multiply; without effect outside of it."""
    return x.to(autocast_dtype(x) or x.dtype)


def in_bfloat16(x: Tensor) -> Tensor:
    """Casts to bfloat16 under bfloat16 autocast. Under float16 the type stays: its range is too small for hidden states
    and their gradients."""
    return x.to(torch.bfloat16) if autocast_dtype(x) == torch.bfloat16 else x
