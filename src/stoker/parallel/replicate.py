"""Data parallelism with PyTorch's DistributedDataParallel, with summed gradients."""

# Annotations are types here and not strings, as DistributedDataParallel checks those of its hook.
from collections import deque
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from stoker.parallel.mesh import Mesh

EXACT_STEPS = 10  # before PowerSGD begins
# PowerSGD's callbacks hold their group and are freed in one of its threads. Were theirs the last reference, that thread
# would wait for itself to end, which aborts the process.
_HELD: deque[dist.ProcessGroup] = deque(maxlen=8)


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
        _HELD.append(group)
        state = PowerSgd(group, matrix_approximation_rank=rank, start_powerSGD_iter=EXACT_STEPS)
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


class PowerSgd(PowerSGDState):
    """PowerSGD's state of each bucket of gradients (Vogels et al., 2019).

    Attributes:
        finite: whether the last result was finite, by bucket: the same on all processes.
    """

    def __init__(self, group: dist.ProcessGroup, **settings: Any) -> None:
        super().__init__(group, **settings)
        self.finite: dict[int, torch.Tensor] = {}


def _power_sgd(state: PowerSgd, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Sums a bucket. The state after a step that was not finite is dropped."""
    index = bucket.index()
    if index in state.finite and not state.finite.pop(index):
        for held in (state.q_memory_dict, state.p_memory_dict, state.error_dict):
            held.pop(index, None)

    def summed(done: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
        mean = done.value()
        state.finite[index] = mean.isfinite().all()
        return mean.mul_(state.process_group.size())

    return powerSGD_hook(state, bucket).then(summed)
