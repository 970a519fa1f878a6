"""Data parallelism with PyTorch's DistributedDataParallel, with summed gradients."""

# Annotations are types here and not strings, as DistributedDataParallel checks those of its hook.
from collections import deque

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from stoker.parallel.mesh import Mesh
from stoker.parallel.power_sgd import PowerSgd, summed_by_power_sgd

# PowerSGD's callbacks reference their group and are freed in one of its threads. If theirs were the last reference,
# that thread would join itself, which aborts the process.
_HELD: deque[dist.ProcessGroup] = deque(maxlen=8)


class Replicated(DistributedDataParallel):
    """Copies of a module whose gradients are summed.

    Attributes:
        power_sgd: PowerSGD's state; None if gradients are summed otherwise.
    """

    power_sgd: PowerSgd | None = None


def replicate(root: nn.Module, mesh: Mesh, *, may_be_unused: bool = False) -> Replicated:
    """Sums gradients over all processes with the same weights, during the backward pass.

    Args:
        may_be_unused: whether a forward pass may leave out trained parameters.
    """
    group, layout = mesh.groups["batch"], mesh.layout
    assert group is not None
    replicated = Replicated(
        root,
        process_group=group,
        broadcast_buffers=False,
        gradient_as_bucket_view=True,
        init_sync=False,
        find_unused_parameters=may_be_unused,
    )
    if layout.compress == "powersgd":
        _HELD.append(group)
        state = PowerSgd(group, [p for p in root.parameters() if p.requires_grad], rank=layout.compress_rank)
        replicated.register_comm_hook(state, summed_by_power_sgd)
        replicated.power_sgd = state
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


def power_sgd_of(root: nn.Module | None) -> PowerSgd | None:
    """Returns the PowerSGD state of a module; None if its gradients are summed otherwise."""
    return root.power_sgd if isinstance(root, Replicated) else None
