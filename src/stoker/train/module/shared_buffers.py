"""Buffers that every process of a replicated module changes from its own samples, such as running averages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from stoker.checkpoint.run_weights import saved_buffers
from stoker.parallel.mesh import sum_over


def own_buffers(model: nn.Module) -> list[str]:
    """Returns the names of persistent buffers, but those of batch norms, whose statistics are of all processes."""
    norms = {name for name, module in model.named_modules() if isinstance(module, _BatchNorm)}
    return [name for name in saved_buffers(model) if name.rpartition(".")[0] not in norms]


@contextmanager
def unchanged_buffers(model: nn.Module) -> Iterator[None]:
    """Restores these buffers at the end: for samples that do not count."""
    before = {name: model.get_buffer(name).clone() for name in own_buffers(model)}
    try:
        yield
    finally:
        with torch.no_grad():
            for name, buffer in before.items():
                model.get_buffer(name).copy_(buffer)


class SharedBuffers:
    """Makes the buffers of a module the same on all processes after each step.

    A floating-point buffer becomes the mean over the processes that have changed it; any other the first process'.

    Args:
        group: the processes that have the same weights.
    """

    def __init__(self, model: nn.Module, group: dist.ProcessGroup | None) -> None:
        self._model, self._group, self._names = model, group, own_buffers(model)
        self._before: dict[str, Tensor] = {}

    def begin(self) -> None:
        """Keeps the values before the step."""
        self._before = {name: self._model.get_buffer(name).clone() for name in self._names}

    @torch.no_grad()
    def unite(self) -> None:
        """Makes the buffers equal after the step; a collective."""
        buffers = [self._model.get_buffer(name) for name in self._names]  # a module may have replaced a tensor
        is_changed = [
            not torch.equal(buffer, self._before[name]) for name, buffer in zip(self._names, buffers, strict=True)
        ]
        changing = torch.tensor(is_changed, dtype=torch.float32, device=buffers[0].device)
        dist.all_reduce(changing, group=self._group)
        means: list[tuple[Tensor, Tensor, float]] = []  # buffers, their sums, and the processes that changed them
        for buffer, own, processes in zip(buffers, is_changed, changing.tolist(), strict=True):
            if processes and buffer.is_floating_point():
                means.append((buffer, buffer.clone() if own else torch.zeros_like(buffer), processes))
            elif processes:
                dist.broadcast(buffer, group=self._group, group_src=0)
        sum_over(self._group, *(total for _, total, _ in means))
        for buffer, total, processes in means:
            buffer.copy_(total / processes)
