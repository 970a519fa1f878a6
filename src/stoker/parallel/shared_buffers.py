"""Buffers that every process of a replicated module changes from its own samples, such as running averages."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from stoker.parallel.mesh import sum_over


def own_buffers(model: nn.Module) -> list[Tensor]:
    """Returns the persistent buffers but those of batch norms, whose statistics are of the samples of all processes."""
    kept = model.state_dict().keys()
    norms = {name for name, module in model.named_modules() if isinstance(module, _BatchNorm)}
    return [b for name, b in model.named_buffers() if name in kept and name.rpartition(".")[0] not in norms]


class SharedBuffers:
    """Makes buffers the same on all processes after each step.

    A floating-point buffer changes by the mean of the processes' changes; any other becomes the first process'.

    Args:
        group: the processes that have the same weights.
    """

    def __init__(self, buffers: Sequence[Tensor], group: dist.ProcessGroup | None) -> None:
        self._means = [buffer for buffer in buffers if buffer.is_floating_point()]
        self._copies = [buffer for buffer in buffers if not buffer.is_floating_point()]
        self._before: list[Tensor] = []
        self._group = group

    def begin(self) -> None:
        """Keeps the values before the step."""
        self._before = [buffer.clone() for buffer in self._means]

    @torch.no_grad()
    def unite(self) -> None:
        """Makes the buffers equal after the step; a collective."""
        changes = [buffer - before for buffer, before in zip(self._means, self._before, strict=True)]
        sum_over(self._group, *changes)
        size = dist.get_world_size(self._group)
        for buffer, before, change in zip(self._means, self._before, changes, strict=True):
            buffer.copy_(before + change / size)
        for buffer in self._copies:
            dist.broadcast(buffer, group=self._group, group_src=0)
