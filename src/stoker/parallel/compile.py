"""torch.compile, block by block: the blocks are the same, so they share one compilation.

Applied before recompute, which then runs the compiled block twice: packed attention breaks the graph, and a recomputed
block with a graph break would not be compiled at all.
"""

from __future__ import annotations

import os
import sysconfig
from importlib.util import find_spec
from pathlib import Path
from shutil import which

import torch
from torch import nn

from stoker.models.blocks import blocks_of


def compile_blocks(model: nn.Module) -> int:
    """Compiles every block, or the whole model if it has none; returns their number."""
    blocks = blocks_of(model) or [model]
    # It would cut the graph of a block at the buckets of DistributedDataParallel, which sums between blocks anyway.
    torch._dynamo.config.optimize_ddp = False
    for block in blocks:
        block.forward = torch.compile(block.forward)
    return len(blocks)


def has_compiler() -> bool:
    """Returns whether Triton can build its launchers: it calls a C compiler, with Python's headers."""
    compiler = which(os.environ.get("CC") or "gcc") or which("clang")
    headers = Path(sysconfig.get_path("include")) / "Python.h"
    return find_spec("triton") is not None and compiler is not None and headers.is_file()
