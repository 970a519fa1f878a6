"""Data parallelism, replicated or sharded, for any module."""

from __future__ import annotations

import torch
from torch import nn

from stoker.parallel.apply_to_blocks import apply_to_blocks
from stoker.parallel.batch_norm import synchronise_batch_norms
from stoker.parallel.blocks import blocks_of
from stoker.parallel.gradients import Gradients, Trained
from stoker.parallel.mesh import Mesh
from stoker.parallel.parallel_model import ParallelModel
from stoker.parallel.replicate import replicate
from stoker.parallel.shard import shard


def spread_module(model: nn.Module, mesh: Mesh, *, compiled: bool, compute: torch.dtype | None) -> ParallelModel:
    """Parallelizes a module that every process has whole, with the same weights; a collective.

    Args:
        compiled: whether its blocks are compiled.
        compute: type of matrix products under autocast, if any.
    """
    layout = mesh.layout
    synchronise_batch_norms(model, mesh.groups["batch"])
    apply_to_blocks(model, mesh.device, compiled=compiled, recompute=layout.recompute)
    root = model
    if layout.shard != "none":
        shard(model, blocks_of(model), mesh, compute)
    trained = [Trained(p) for p in model.parameters() if p.requires_grad]
    if layout.shard == "none" and mesh.groups["batch"] is not None:
        root = replicate(model, mesh, may_be_unused=True)
    gradients = Gradients(trained, mesh, reduce_batch=False)
    return ParallelModel(
        model=model, language=None, root=root, pipeline=None, pieces={}, aliases={}, gradients=gradients
    )
