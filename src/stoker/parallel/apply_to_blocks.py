"""Applies float8 products, compilation, recompute and offload of activations to blocks, in this order."""

from __future__ import annotations

import torch
from torch import nn

from stoker.job.layout import Layout
from stoker.models.families.facts import Family
from stoker.parallel.compile import compile_blocks
from stoker.parallel.float8 import Float8, float8_linears
from stoker.parallel.offload.activation_offload import offload_activations
from stoker.parallel.recompute import recompute_blocks


def apply_to_blocks(
    model: nn.Module,
    device: torch.device,
    layout: Layout,
    family: Family | None = None,
    *,
    compiled: bool,
    float8: Float8 = "none",
) -> None:
    """Applies float8, then compile, then recompute of the compiled blocks, then offload of what is still saved.

    A selective recompute of compiled blocks is a part of their compilation.

    Args:
        device: on which the blocks will compute.
        layout: says what is recomputed and offloaded.
        family: of the model, for a recompute of parts.

    Raises:
        CannotRun: the device has no float8 products.
        UserError: the blocks do not support a requested option.
    """
    float8_linears(model, float8, device)
    if compiled:
        compile_blocks(model, selective=layout.recompute == "selective", async_tensor=layout.async_tensor)
    if layout.recompute == "full" or (layout.recompute == "selective" and not compiled):
        recompute_blocks(model, layout.recompute, family)
    if layout.offload == "activations":
        offload_activations(model, device)
