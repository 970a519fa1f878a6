"""Recompute: keep a block's input only, compute the rest again in the backward pass (Chen et al., 2016)."""

from __future__ import annotations

from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint

from stoker.errors import UserError
from stoker.parallel.blocks import blocks_of


def recompute_blocks(model: nn.Module) -> int:
    """Makes every block recompute, with the same random numbers (dropout); says how many there are.

    Raises:
        UserError: the model has no list of blocks.
    """
    blocks = blocks_of(model)
    if not blocks:
        raise UserError("parallel.recompute: the model has no list of blocks to recompute; write none")
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    return len(blocks)
