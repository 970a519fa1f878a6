"""Data parallelism with PyTorch's DistributedDataParallel, with summed gradients.

DistributedDataParallel sums the first step's gradients in one bucket, and then rebuilds its buckets in the order in
which gradients were ready. Sums of three and more processes depend on where a bucket is cut, so the first step after a
restart would have other last bits than in a run without an interruption. Here all steps have the same buckets.
"""

# Annotations are types here and not strings, as DistributedDataParallel checks those of its hook.
import warnings
from collections import deque

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from stoker.parallel.data_parallel.power_sgd import PowerSgd, summed_by_power_sgd
from stoker.parallel.mesh import Mesh

# PowerSGD's callbacks reference their group and are freed in one of its threads. If theirs were the last reference,
# that thread would join itself, which aborts the process.
_HELD: deque[dist.ProcessGroup] = deque(maxlen=8)


class Replicated(DistributedDataParallel):
    """Copies of a module whose gradients are summed, in the same buckets from the first step on.

    Attributes:
        power_sgd: PowerSGD's state; None if gradients are summed otherwise.
    """

    power_sgd: PowerSgd | None = None

    def __init__(self, module: nn.Module, group: dist.ProcessGroup, *, may_be_unused: bool) -> None:
        with warnings.catch_warnings():
            # torch 2.13 warns of `broadcast_buffers`, and has no other way yet to leave all buffers as they are.
            warnings.simplefilter("ignore", FutureWarning)
            super().__init__(
                module,
                process_group=group,
                broadcast_buffers=False,
                gradient_as_bucket_view=True,
                init_sync=False,
                find_unused_parameters=may_be_unused,
            )
        # Takes the parameters' order for that of the gradients. No effect where parameters may be unused: buckets are
        # not rebuilt then.
        self.reducer._push_all_rebuilt_params()
        self.reducer._rebuild_buckets()

    def _build_params_for_reducer(self) -> tuple[list[nn.Parameter], list[bool]]:
        """Returns the parameters, the last one first as gradients are ready, and whether each has sparse gradients."""
        parameters, sparse = super()._build_params_for_reducer()
        if self.find_unused_parameters:  # the buckets of the constructor, which reverses them itself, are kept
            return parameters, sparse
        return parameters[::-1], sparse[::-1]


def replicate(root: nn.Module, mesh: Mesh, *, may_be_unused: bool = False) -> Replicated:
    """Sums gradients over all processes with the same weights, during the backward pass.

    Args:
        may_be_unused: whether a forward pass may leave out trained parameters.
    """
    group, layout = mesh.groups["batch"], mesh.layout
    assert group is not None
    replicated = Replicated(root, group, may_be_unused=may_be_unused)
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
