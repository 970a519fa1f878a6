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
from typing import Any

import torch
from torch import nn
from torch._functorch import config as functorch_config

from stoker.models.blocks import blocks_of

ROW_INDEX = r".*\._rows\[\d+\]\.index\."  # how a block reaches the numbers of `stoker.models.attention.varlen_index`
# Versions of a block: the first one or another, in training or not, before and after lengths have differed, with common
# prefixes or not, with documents of one length or not. Those beyond the limit would not be compiled.
MOST_VERSIONS = 64
# Share of the bytes that a compiled block saves by default. Below 1, torch first recomputes all operators but products
# and attention, which is enough for this share, and products only if it is not.
SELECTIVE_BUDGET = 0.9
ASYNC_TENSOR: dict[str, Any] = {"_micro_pipeline_tp": True}  # see `stoker.parallel.tensor_parallel.async_tensor`


def compile_blocks(model: nn.Module, *, selective: bool = False, async_tensor: bool = False) -> int:
    """Compiles every block, or the whole model if it has none; returns their number.

    Args:
        selective: whether the backward pass recomputes the operators that are cheap.
        async_tensor: whether collectives of tensor parallelism overlap with matrix products.
    """
    blocks = blocks_of(model) or [model]
    _set_options()
    for block in blocks:
        block.forward = torch.compile(block.forward, options=ASYNC_TENSOR if async_tensor else None)
        if selective:  # read whenever the block is compiled: at its first call, and for further shapes
            block.forward = functorch_config.patch(activation_memory_budget=SELECTIVE_BUDGET)(block.forward)
    return len(blocks)


def _set_options() -> None:
    """Makes rows of any number of documents and of any lengths share compilations."""
    # It would cut the graph of a block at the buckets of DistributedDataParallel, which sums between blocks anyway.
    torch._dynamo.config.optimize_ddp = False
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MOST_VERSIONS)
    # Numbers that are reached by a global are constants otherwise, and the longest document differs from row to row.
    torch.compiler.config.dynamic_sources = ROW_INDEX
    # The length of a row with one document equals that of its longest, which does not hold for other rows.
    torch.fx.experimental._config.use_duck_shape = False


def has_compiler() -> bool:
    """Returns whether Triton can build its launchers: it calls a C compiler, with Python's headers."""
    compiler = which(os.environ.get("CC") or "gcc") or which("clang")
    headers = Path(sysconfig.get_path("include")) / "Python.h"
    return find_spec("triton") is not None and compiler is not None and headers.is_file()
