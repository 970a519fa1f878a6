"""torch.compile, block by block: the blocks are alike, so one compilation serves all of them."""

from __future__ import annotations

from torch import nn

from stoker.parallel.blocks import blocks_of


def compile_blocks(model: nn.Module) -> int:
    """Compiles every block, or the whole model where there are none; says how many were compiled."""
    blocks = blocks_of(model) or [model]
    for block in blocks:
        block.compile()
    return len(blocks)
