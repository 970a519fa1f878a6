"""Applies float8 products, compilation and recompute to the blocks of a model, in this order."""

from __future__ import annotations

import torch
from torch import nn

from stoker.job.layout import Recompute
from stoker.models.families.facts import Family
from stoker.parallel.compile import compile_blocks
from stoker.parallel.float8 import Float8, float8_linears
from stoker.parallel.recompute import recompute_blocks


def apply_to_blocks(
    model: nn.Module,
    device: torch.device,
    family: Family | None = None,
    *,
    compiled: bool,
    recompute: Recompute,
    float8: Float8 = "none",
) -> None:
    """Applies float8, then compile, then recompute of the compiled blocks.

    Args:
        device: on which the blocks will compute.
        family: of the model, for a recompute of parts.

    Raises:
        CannotRun: the device has no float8 products.
        UserError: the blocks do not support a requested option.
    """
    float8_linears(model, float8, device)
    if compiled:
        compile_blocks(model)
    if recompute != "none":
        recompute_blocks(model, recompute, family)
