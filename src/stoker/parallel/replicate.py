"""Data parallelism with PyTorch's DistributedDataParallel, with summed gradients."""

# Annotations are types here and not strings, as DistributedDataParallel checks those of its hook.
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from stoker.parallel.mesh import Mesh


def replicate(root: nn.Module, mesh: Mesh, *, may_be_unused: bool = False) -> DistributedDataParallel:
    """Sums gradients over all processes with the same weights, during the backward pass.

    Args:
        may_be_unused: whether a forward pass may leave out trained parameters.
    """
    group = mesh.groups["batch"]
    replicated = DistributedDataParallel(
        root,
        process_group=group,
        broadcast_buffers=False,
        gradient_as_bucket_view=True,
        init_sync=False,
        find_unused_parameters=may_be_unused,
    )
    replicated.register_comm_hook(group, _sum)
    return replicated


def _sum(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    return work.get_future().then(lambda done: done.value()[0])
