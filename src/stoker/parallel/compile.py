"""torch.compile, block by block: the blocks are the same, so they share one compilation.

Applied before recompute, which then runs the compiled block twice: packed attention breaks the graph, and a recomputed
block with a graph break would not be compiled at all.
"""

from __future__ import annotations

import torch
from torch import nn

from stoker.parallel.blocks import blocks_of


def compile_blocks(model: nn.Module) -> int:
    """Compiles every block, or the whole model if it has none; returns their number."""
    blocks = blocks_of(model) or [model]
    for block in blocks:
        block.forward = torch.compile(block.forward)
    return len(blocks)
