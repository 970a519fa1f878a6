"""Finishes gradients after a step's last backward pass: sums partial ones, joins ties, computes the global norm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from stoker.parallel.mesh import Axis, Mesh, sum_over
from stoker.parallel.shard_spec import local_shard


@dataclass(frozen=True)
class Trained:
    """A trained parameter, and how its gradient is distributed.

    Attributes:
        split: whether tensor processes hold different parts of it.
        partial: whether its gradient must be summed over the tensor processes.
        copy: whether it is the last stage's copy of a tied embedding.
        tied: whether it is such a copy, or another stage has one.
    """

    parameter: Parameter
    split: bool = False
    partial: bool = False
    copy: bool = False
    tied: bool = False


class Gradients:
    """The gradients of this process' parameters, seen as parts of the whole model's."""

    def __init__(self, trained: Sequence[Trained], mesh: Mesh, *, reduce_batch: bool) -> None:
        """
        Args:
            reduce_batch: whether gradients must be summed over the processes with the same weights, which no
                wrapper does.
        """
        self._trained, self._mesh, self._reduce_batch = trained, mesh, reduce_batch

    def finish(self) -> None:
        """Completes the gradients after the step's last backward pass."""
        self._lay_out()
        if self._reduce_batch:
            self._sum([t.parameter for t in self._trained], "batch")
        self._sum([t.parameter for t in self._trained if t.partial], "tensor")
        self._join_ties()

    def norm(self) -> Tensor:
        """Returns the L2 norm over all parameters of all processes, the same on each; 0-d."""
        own: dict[bool, list[Tensor]] = {True: [], False: []}
        for t in self._trained:
            if t.parameter.grad is not None and not t.copy:
                own[t.split].append(local_shard(t.parameter.grad))
        split, whole = (self._sum_of_squares(_norms(own[key])) for key in (True, False))
        if self._mesh.layout.shard != "none":
            sum_over(_shards(self._mesh), split, whole)
        sum_over(self._mesh.groups["tensor"], split)
        total = split + whole
        sum_over(self._mesh.groups["pipe"], total)
        return total.sqrt()

    def clip(self, norm: Tensor, limit: float) -> None:
        """Scales the gradients down to a norm of ``limit``; 0 disables it."""
        if limit:
            factor = (limit / (norm + 1e-6)).clamp(max=1.0)  # as torch.nn.utils.clip_grad_norm_
            gradients = [local_shard(t.parameter.grad) for t in self._trained if t.parameter.grad is not None]
            for kind, alike in _by_kind(gradients).items():
                torch._foreach_mul_(alike, factor.to(*kind))

    def _lay_out(self) -> None:
        """Gives gradients the strides of their parameters: zero-bubble schedules change them, and fused optimizers
        require them."""
        for parameter in (t.parameter for t in self._trained):
            grad = parameter.grad
            if grad is not None and not isinstance(grad, DTensor) and grad.stride() != parameter.stride():
                parameter.grad = torch.empty_like(parameter, requires_grad=False).copy_(grad)

    def _sum_of_squares(self, norms: list[Tensor]) -> Tensor:
        if norms:
            return torch.stack([norm.to(self._mesh.device) for norm in norms]).square().sum()
        kinds = [local_shard(t.parameter).dtype for t in self._trained]
        return torch.zeros((), dtype=kinds[0] if kinds else torch.float32, device=self._mesh.device)

    def _sum(self, parameters: list[Parameter], axis: Axis) -> None:
        group = self._mesh.groups[axis]
        if group is None:
            return
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        sum_over(group, *(local_shard(p.grad) for p in parameters if p.grad is not None))

    def _join_ties(self) -> None:
        """Sums the gradients of a tied embedding's two uses: on the first stage and, as the head, on the last."""
        tied = [t.parameter for t in self._trained if t.tied]
        if not tied or self._mesh.layout.pipeline == 1:
            return
        gradients = [local_shard(p.grad) if p.grad is not None else torch.zeros_like(local_shard(p)) for p in tied]
        total = torch.stack(gradients).sum(0) if len(gradients) > 1 else gradients[0].clone()
        if len(tied) == 1:  # the other copy is another process'
            dist.all_reduce(total, group=self._mesh.groups["ends"])
        for parameter, gradient in zip(tied, gradients, strict=True):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
                gradient = local_shard(parameter.grad)  # noqa: PLW2901
            gradient.copy_(total)


def _norms(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Returns the L2 norm of each tensor, 0-d; one launch for each device and dtype instead of one each."""
    return [norm for alike in _by_kind(tensors).values() for norm in torch._foreach_norm(alike)]


def _by_kind(tensors: Sequence[Tensor]) -> dict[tuple[torch.device, torch.dtype], list[Tensor]]:
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return kinds


def _shards(mesh: Mesh) -> dist.ProcessGroup | None:
    group = mesh.sharding.get_group("shard") if mesh.sharding.ndim > 1 else mesh.sharding.get_group()
    return group if dist.get_world_size(group) > 1 else None
