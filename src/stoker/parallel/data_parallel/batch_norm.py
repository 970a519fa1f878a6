"""Batch normalisation over all processes, with the statistics of the samples of all of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from stoker.parallel.collectives import copy_to, sum_from

_counted = [1.0]  # whether the samples of the current pass count, the innermost last


@contextmanager
def without_batch_statistics() -> Iterator[None]:
    """Within it synchronised batch norms leave this process' samples out of their statistics."""
    _counted.append(0.0)
    try:
        yield
    finally:
        _counted.pop()


@contextmanager
def keep_running_averages(module: nn.Module) -> Iterator[None]:
    """Restores the running averages of a module's norms at the end: for samples that have been counted before."""
    averages = [buffer for norm in module.modules() if isinstance(norm, _NormBase) for buffer in norm.buffers()]
    before = [buffer.clone() for buffer in averages]
    try:
        yield
    finally:
        for buffer, value in zip(averages, before, strict=True):
            buffer.copy_(value)


def synchronise_batch_norms(model: nn.Module, group: dist.ProcessGroup | None) -> int:
    """Makes every batch norm use the samples of all processes in training; returns their number.

    PyTorch's own ``SyncBatchNorm`` runs on GPUs only.
    """
    if group is None:
        return 0
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    for norm in norms:
        norm.forward = partial(_forward, norm, group)  # type: ignore[method-assign]
    return len(norms)


def _forward(norm: Any, group: dist.ProcessGroup, x: Tensor) -> Tensor:
    """Shape (N, C, ...), normalised for each of the C channels (Ioffe and Szegedy, 2015)."""
    if not norm.training:
        return type(norm).forward(norm, x)
    others = [dim for dim in range(x.dim()) if dim != 1]
    shape = [1, -1, *[1] * (x.dim() - 2)]
    kept = x.to(torch.promote_types(x.dtype, torch.float32))
    count = torch.tensor(_counted[-1] * (x.numel() // x.shape[1]), dtype=kept.dtype, device=x.device)
    dist.all_reduce(count, group=group)
    mean_C = _total(kept.sum(others) * _counted[-1], group) / count
    centred = kept - mean_C.view(shape)
    variance_C = _total(centred.square().sum(others) * _counted[-1], group) / count
    _remember(norm, mean_C.detach(), variance_C.detach() * count / (count - 1).clamp(min=1))
    out = centred * torch.rsqrt(variance_C + norm.eps).view(shape)
    if norm.affine:
        out = out * norm.weight.view(shape) + norm.bias.view(shape)
    return out.to(x.dtype)


def _total(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Returns the sum over the processes, whose gradients are summed as well."""
    return copy_to(sum_from(x, group), group)


@torch.no_grad()
def _remember(norm: Any, mean_C: Tensor, unbiased_C: Tensor) -> None:
    if not norm.track_running_stats:
        return
    norm.num_batches_tracked.add_(1)
    weight = norm.momentum if norm.momentum is not None else 1.0 / float(norm.num_batches_tracked)
    norm.running_mean.lerp_(mean_C.to(norm.running_mean.dtype), weight)
    norm.running_var.lerp_(unbiased_C.to(norm.running_var.dtype), weight)
