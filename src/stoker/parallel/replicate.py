"""Data parallelism with PyTorch's DistributedDataParallel, with summed gradients."""

# Annotations are types here and not strings, as DistributedDataParallel checks those of its hook.
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from stoker.parallel.mesh import Mesh

EXACT_STEPS = 10  # before PowerSGD begins


def replicate(root: nn.Module, mesh: Mesh, *, may_be_unused: bool = False) -> DistributedDataParallel:
    """Sums gradients over all processes with the same weights, during the backward pass.

    Args:
        may_be_unused: whether a forward pass may leave out trained parameters.
    """
    group, layout = mesh.groups["batch"], mesh.layout
    assert group is not None
    replicated = DistributedDataParallel(
        root,
        process_group=group,
        broadcast_buffers=False,
        gradient_as_bucket_view=True,
        init_sync=False,
        find_unused_parameters=may_be_unused,
    )
    if layout.compress == "powersgd":
        rank = layout.compress_rank
        state = PowerSGDState(group, matrix_approximation_rank=rank, start_powerSGD_iter=EXACT_STEPS)
        replicated.register_comm_hook(state, _power_sgd)
    else:
        replicated.register_comm_hook(group, _sum_in_bf16 if layout.compress == "bf16" else _sum)
    return replicated


def _sum(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


def _sum_in_bf16(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    gradient = bucket.buffer()
    work = dist.all_reduce(gradient.to(torch.bfloat16), group=group, async_op=True)
    return work.get_future().then(lambda done: gradient.copy_(done.value()[0]))


def _power_sgd(state: PowerSGDState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """PowerSGD (Vogels et al., 2019). What it remembers of a step that was not finite is dropped."""
    index = bucket.index()
    narrow = state.q_memory_dict.get(index)
    if narrow is not None and not narrow.isfinite().all():  # the same on all processes, as it has been summed
        for held in (state.q_memory_dict, state.p_memory_dict, state.error_dict):
            held.pop(index, None)
    return powerSGD_hook(state, bucket).then(partial(_times, state.process_group.size()))


def _times(processes: int, done: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
    """The sum, of which PowerSGD gives the mean."""
    return done.value().mul_(processes)
