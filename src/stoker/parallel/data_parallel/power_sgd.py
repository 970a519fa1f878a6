"""All-reduce of gradients by PowerSGD (Vogels et al., 2019), with its state by parameter.

torch's hook keeps its state by bucket. State by parameter can be saved, and does not depend on which parameters share a
bucket.
"""

# Annotations are types here and not strings, as DistributedDataParallel checks those of its hook.
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

EXACT_STEPS = 10  # steps without compression at the start
Memory = tuple[Tensor, Tensor | None]  # error and right factor of a parameter


class PowerSgd(PowerSGDState):
    """PowerSGD's state of each parameter.

    The state of a parameter is its error, this process' difference of gradient and product (error feedback), and its
    right factor, from which the next step starts. The factor is None if the gradient is sent uncompressed.

    Args:
        parameters: the trained parameters, in the same order on all processes.
        rank: rank of the approximation.
    """

    def __init__(self, group: dist.ProcessGroup, parameters: Sequence[nn.Parameter], *, rank: int) -> None:
        super().__init__(group, matrix_approximation_rank=rank, start_powerSGD_iter=EXACT_STEPS)
        self._order: dict[Tensor, int] = {parameter: number for number, parameter in enumerate(parameters)}
        self._buckets: dict[int, list[Tensor]] = {}  # parameters by bucket, for state in the hook's dictionaries
        self._before: Mapping[Tensor, Memory] = {}  # state before this step
        self._steps_before = 0
        self._restored: Mapping[Tensor, Memory] = {}  # restored state that was not used yet

    def memories(self) -> dict[Tensor, Memory]:
        """Returns error and right factor by parameter."""
        found = dict(self._restored)
        for index, parameters in self._buckets.items():
            errors = self.error_dict[index].split([p.numel() for p in parameters])
            sent = self._factored(parameters)
            rights = dict(
                zip(sent, self.q_memory_dict[index].split([_size(p, self._rank(p)) for p in sent]), strict=True)
            )
            found |= {p: (e.view_as(p), rights.get(p)) for p, e in zip(parameters, errors, strict=True)}
        return found

    def restore(self, steps: int, memories: Mapping[Tensor, Memory]) -> None:
        """Restores the state after ``steps`` steps."""
        for held in (self.q_memory_dict, self.p_memory_dict, self.error_dict, self._buckets):
            held.clear()
        self.iter, self._restored = steps, memories

    def undo(self) -> None:
        """Restores the state before the last step, whose update was not made."""
        self.restore(self._steps_before, self._before)

    def lay_out(self, bucket: dist.GradBucket) -> None:
        """Writes the state of a bucket's parameters to the hook's dictionaries."""
        index, parameters = bucket.index(), bucket.parameters()
        if index == 0:
            known = self.memories()  # the hook changes right factors in place
            self._before = {p: (error, None if right is None else right.clone()) for p, (error, right) in known.items()}
            self._steps_before, self._restored = self.iter, {}
        if self.iter < self.start_powerSGD_iter:
            return
        if index in self._buckets:
            return
        buffer = bucket.buffer()
        errors = [self._before[p][0] if p in self._before else torch.zeros_like(p) for p in parameters]
        sent = self._factored(parameters)
        self._buckets[index] = parameters
        self.error_dict[index] = torch.cat([error.reshape(-1).to(buffer) for error in errors])
        self.q_memory_dict[index] = torch.cat([buffer.new_empty(0), *(self._right(p).to(buffer) for p in sent)])
        self.p_memory_dict[index] = buffer.new_empty(sum(len(p) * self._rank(p) for p in sent))

    def _rank(self, parameter: Tensor) -> int:
        return min(len(parameter), parameter.numel() // len(parameter), self.matrix_approximation_rank)

    def _factored(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Returns the compressed parameters in the hook's order: grouped by shape, in the order of first occurrence."""
        by_shape: dict[tuple[int, int], list[Tensor]] = {}
        for parameter in parameters:
            rows, columns = len(parameter), parameter.numel() // len(parameter)
            if (rows + columns) * self._rank(parameter) * self.min_compression_rate < rows * columns:
                by_shape.setdefault((rows, columns), []).append(parameter)
        return [parameter for alike in by_shape.values() for parameter in alike]

    def _right(self, parameter: Tensor) -> Tensor:
        """Returns the flattened right factor; initially a random one, equal on all processes."""
        known = self._before.get(parameter, (None, None))[1]
        if known is not None:
            return known.reshape(-1)
        made = torch.Generator().manual_seed(self.iter * len(self._order) + self._order[parameter])
        return torch.randn(_size(parameter, self._rank(parameter)), generator=made, dtype=parameter.dtype)


def summed_by_power_sgd(state: PowerSgd, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """DistributedDataParallel hook that sums a bucket by PowerSGD."""
    state.lay_out(bucket)
    ranks = state.process_group.size()
    found = powerSGD_hook(state, bucket).then(lambda done: done.value().mul_(ranks))
    if bucket.buffer().device.type == "cpu":  # gloo's threads send the factors; messages of later buckets and of
        found.wait()  # DistributedDataParallel could otherwise interleave with them, in another order on each process
    return found


def _size(parameter: Tensor, rank: int) -> int:
    """Returns the number of elements of the right factor."""
    return parameter.numel() // len(parameter) * rank
