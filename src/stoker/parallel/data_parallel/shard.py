"""Sharded data parallelism (ZeRO: Rajbhandari et al., 2020) with PyTorch's ``fully_shard``.

zero1 and zero2 gather the weights once a step and keep them; zero3 frees them after each block. zero2 and
zero3 reduce the gradients of each micro-batch to shards; zero1 keeps them whole until the last one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from stoker.job.layout import Layout
from stoker.parallel.mesh import Mesh


def shard(
    root: nn.Module,
    blocks: Sequence[nn.Module],
    mesh: Mesh,
    compute: torch.dtype | None,
    *,
    whole: set[nn.Parameter] | None = None,
) -> None:
    """Shards each block, and all other parameters with the root. Works on the meta device.

    Args:
        root: the module that is called for the forward pass.
        compute: dtype that gathered weights are cast to; None for their own.
        whole: parameters that are not sharded.
    """
    layout = mesh.layout
    offload = OffloadPolicy()
    if layout.offload == "params":
        offload = CPUOffloadPolicy(pin_memory=mesh.device.type == "cuda")
    # Without compression gradients are reduced in float32, or in float64 if that is their dtype.
    exact = torch.float32 if compute else None
    reduced = torch.bfloat16 if layout.compress == "bf16" else exact
    types = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduced)
    again = layout.shard == "zero3"
    for part in (*blocks, root):
        fully_shard(
            part,
            mesh=mesh.sharding,
            reshard_after_forward=again and part is not root,
            mp_policy=types,
            offload_policy=offload,
            ignored_params=whole,
        )
    for module in sharded_modules(root):
        # Losses are divided by the targets of the whole step, so gradients are summed and not averaged.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def prefetch(blocks: Sequence[nn.Module], depth: int) -> None:
    """Has each block gather the weights of the next ``depth`` blocks while it computes, in both passes.

    fully_shard itself gathers one block ahead.

    Args:
        blocks: sharded blocks in the order of the forward pass.
    """
    if depth == 1:
        return
    modules: list[FSDPModule] = [block for block in blocks if isinstance(block, FSDPModule)]
    for place, module in enumerate(modules):
        module.set_modules_to_forward_prefetch(modules[place + 1 : place + 1 + depth])
        module.set_modules_to_backward_prefetch(modules[max(0, place - depth) : place][::-1])


def sharded_modules(root: nn.Module) -> Iterator[FSDPModule]:
    """Yields the modules that have been sharded, the root first."""
    return (module for module in root.modules() if isinstance(module, FSDPModule))


def reshard(root: nn.Module | None) -> None:
    """Frees the weights that stay gathered after a forward pass without a backward pass.

    While they are gathered, the model's parameters are not those of the optimizer.
    """
    for module in sharded_modules(root) if root is not None else ():
        module.reshard()


@contextmanager
def micro_batch(root: FSDPModule, layout: Layout, *, last: bool) -> Iterator[None]:
    """The context of the forward and the backward pass of a micro-batch.

    Args:
        last: whether it is the last one of the step, after which gradients must be complete.
    """
    root.set_is_last_backward(last)
    root.set_requires_gradient_sync(last or layout.shard != "zero1")
    root.set_requires_all_reduce(last)  # over replicas, of the accumulated shards
    if layout.shard != "zero3":
        root.set_reshard_after_backward(last)
    yield
