"""Data parallelism, replicated or sharded, for any module."""

from __future__ import annotations

import torch
from torch import nn

from stoker.errors import Problem, UserError
from stoker.job.layout import Layout
from stoker.models.blocks import blocks_of
from stoker.parallel.apply_to_blocks import apply_to_blocks
from stoker.parallel.data_parallel.batch_norm import synchronise_batch_norms
from stoker.parallel.data_parallel.replicate import replicate
from stoker.parallel.data_parallel.shard import prefetch, shard
from stoker.parallel.gradients import Gradients, Trained
from stoker.parallel.mesh import Mesh
from stoker.parallel.parallel_model import ParallelModel
from stoker.parallel.shard_spec import WHOLE


def check_scalars(model: nn.Module, layout: Layout) -> None:
    """Raises UserError at the key that needs rows of every parameter, where one is a scalar."""
    scalars = [(name, p.requires_grad) for name, p in model.named_parameters() if p.dim() == 0]
    trained = [name for name, requires_grad in scalars if requires_grad]
    value: str
    if layout.shard != "none" and scalars:
        key, value, (name, _) = "shard", layout.shard, scalars[0]
    elif layout.compress == "powersgd" and trained:
        key, value, name = "compress", layout.compress, trained[0]
    else:
        return
    message = f"`{key}: {value}` divides parameters into rows, and {name} is a scalar"
    hint = f"make it a tensor of one entry, shape (1,), or write `{key}: none`"
    raise UserError(Problem(message, hint, key=f"parallel.{key}"))


def spread_module(model: nn.Module, mesh: Mesh, *, compiled: bool, compute: torch.dtype | None) -> ParallelModel:
    """Parallelizes a module that every process has whole, with the same weights; a collective.

    Args:
        compiled: whether its blocks are compiled.
        compute: type of matrix products under autocast, if any.

    Raises:
        UserError: the layout cannot have a parameter without dimensions.
    """
    layout = mesh.layout
    check_scalars(model, layout)
    synchronise_batch_norms(model, mesh.groups["batch"])
    apply_to_blocks(model, mesh.device, layout, compiled=compiled)
    root = model
    if layout.shard != "none":
        shard(model, blocks_of(model), mesh, compute)
        prefetch(blocks_of(model), layout.prefetch)
    trained = [Trained(p) for p in model.parameters() if p.requires_grad]
    if layout.shard == "none" and mesh.groups["batch"] is not None:
        root = replicate(model, mesh, may_be_unused=True)
    gradients = Gradients(trained, mesh, reduce_batch=False)
    return ParallelModel(model=model, language=None, root=root, pipeline=None, shards=WHOLE, gradients=gradients)
