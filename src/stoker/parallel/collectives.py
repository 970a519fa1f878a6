"""Differentiable collectives.

Each forward collective has its counterpart in the backward pass (Shoeybi et al., 2019, section 3; Korthikanti et al.,
2022, section 4.2.2): an all-reduce for a copy, a reduce-scatter for an all-gather.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def copy_to(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Returns ``x`` unchanged; in the backward pass its gradients are summed over the processes."""
    return x if group is None else _Copy.apply(x, group)


def sum_from(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Returns the sum over the processes, whose gradient, the same on each, goes to every addend."""
    return x if group is None else _Sum.apply(x, group)


def gather_parts(x: Tensor, dim: int, group: dist.ProcessGroup | None) -> Tensor:
    """Concatenates the processes' parts, of equal size; each process gets its part of the summed gradients."""
    return x if group is None else _Gather.apply(x, dim, group)


def scatter_sum(x: Tensor, dim: int, group: dist.ProcessGroup | None) -> Tensor:
    """This process' part of the sum over the processes. The dimension must be divisible by their number."""
    return x if group is None else _ScatterSum.apply(x, dim, group)


def exchange(x: Tensor, split: int, join: int, group: dist.ProcessGroup | None) -> Tensor:
    """Splits one dimension over the processes and gathers another (all-to-all); both must be divisible."""
    return x if group is None else _Exchange.apply(x, split, join, group)


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _all_reduce(grad, ctx.group), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return _filled(_all_reduce(x, group))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return _filled(all_gather(x, dim, group))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return reduce_scatter(grad, ctx.dim, ctx.group), None, None


class _ScatterSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return _filled(reduce_scatter(x, dim, group))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return all_gather(grad, ctx.dim, ctx.group), None, None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, split: int, join: int, group: dist.ProcessGroup) -> Tensor:
        ctx.split, ctx.join, ctx.group = split, join, group
        return _filled(all_to_all(x, split, join, group))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return all_to_all(grad, ctx.join, ctx.split, ctx.group), None, None, None


def _filled(x: Tensor) -> Tensor:
    """Returns a result that a collective wrote in place, as torch 2.11 needs it.

    It compiles an autograd function that returns such a tensor without gradients, but not one that returns a view of
    it.
    """
    return x.view_as(x) if torch.compiler.is_compiling() else x


def _all_reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = x.contiguous().clone()
    dist.all_reduce(total, group=group)
    return total


def all_gather(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Concatenates the processes' tensors, of equal shape, along a dimension.

    Like `reduce_scatter`, it consists of operators that `stoker.parallel.tensor_parallel.async_tensor` needs in
    compiled blocks.
    """
    size = dist.get_world_size(group)
    first = _with_dim_first(x, dim)
    mine = x if first is None else first
    gathered = mine.new_empty(size * mine.shape[0], *mine.shape[1:])
    dist.all_gather_into_tensor(gathered, mine.contiguous(), group=group)
    return torch.cat(gathered.chunk(size), dim) if first is None else gathered.view(*x.shape[:dim], *gathered.shape)


def reduce_scatter(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """This process' part, along a dimension, of the sum over the processes."""
    size = dist.get_world_size(group)
    first = _with_dim_first(x, dim)
    parts = torch.cat(x.chunk(size, dim)) if first is None else first
    mine = parts.new_empty(parts.shape[0] // size, *parts.shape[1:])
    dist.reduce_scatter_tensor(mine, parts.contiguous(), group=group)
    return mine if first is None else mine.view(*x.shape[:dim], *mine.shape)


def _with_dim_first(x: Tensor, dim: int) -> Tensor | None:
    """Returns ``x`` without the dimensions before ``dim`` if they are 1, as in packed rows: parts along the first
    dimension are contiguous, and need no copies."""
    return x.flatten(0, dim) if x.shape[:dim].numel() == 1 else None


def all_to_all(x: Tensor, split: int, join: int, group: dist.ProcessGroup) -> Tensor:
    """Sends the n-th part along ``split`` to the n-th process; concatenates the received parts along ``join``."""
    size = dist.get_world_size(group)
    parts = torch.stack(x.chunk(size, split))
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    return torch.cat(list(received), dim=join)
