"""Muon: momentum with an orthogonalised update of each matrix (Jordan et al., 2024)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from stoker.errors import Problem, UserError
from stoker.grouping import balanced, grouped
from stoker.parallel.offload.host_optimizer import Groups
from stoker.parallel.owners import on_gathered_rows, on_owners
from stoker.parallel.shard_spec import local_shard
from stoker.train.optim.orthogonalise import orthogonalised_together

MOMENTUM = 0.95
RMS = 0.2  # of an update's entries, as AdamW's: its learning rate fits (Liu et al., 2025, arXiv:2502.16982)
AT_ONCE = 1 << 26  # elements that are orthogonalised at a time, more where each process has one matrix; and gathered
EXPERTS_AT_ONCE = 1 << 24  # elements of a tensor of experts that one process orthogonalises


@dataclass(frozen=True)
class _Matrices:
    """Matrices of a parameter, or this process' rows of one.

    Attributes:
        weights, gradients, momenta: shape (matrices, rows of this process, columns).
        rows: number of rows of a whole matrix.
        step: factor of the update.
    """

    weights: Tensor
    gradients: Tensor
    momenta: Tensor
    rows: int
    step: float

    @property
    def size(self) -> int:
        """Number of elements of the whole matrices."""
        return len(self.weights) * self.rows * self.weights.shape[-1]

    @property
    def cost(self) -> int:
        """Proportional to the operations of an iteration."""
        return self.size * min(self.rows, self.weights.shape[-1])


@dataclass(frozen=True)
class _Processes:
    """Processes that share the work on a parameter.

    Attributes:
        copies: those with the same part of it.
        shards: those with the rows of its matrices.
    """

    copies: dist.ProcessGroup | None
    shards: dist.ProcessGroup | None


class Muon(Optimizer):
    """Muon with Nesterov momentum and decoupled weight decay, over matrices of shape (R, C) or (E, R, C).

    A matrix is orthogonalised by one of the processes that have it or its rows.

    Args:
        copies: the processes with the same parameters, unless these are sharded.
    """

    def __init__(self, groups: Groups, lr: float, copies: dist.ProcessGroup | None = None) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0})
        self._copies = copies

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Takes one step. Parameters without a gradient do not change."""
        by_kind: dict[tuple[_Processes, torch.dtype], list[_Matrices]] = {}
        for group in self.param_groups:
            stepped = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not stepped:
                continue
            weights = [local_shard(parameter) for parameter in stepped]
            gradients = [local_shard(parameter.grad) for parameter in stepped]
            momenta = [local_shard(self._momentum(parameter)) for parameter in stepped]
            torch._foreach_lerp_(momenta, gradients, 1 - MOMENTUM)
            torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
            for parameter, *tensors in zip(stepped, weights, gradients, momenta, strict=True):
                kind = self._processes(parameter), parameter.dtype
                by_kind.setdefault(kind, []).extend(_matrices_in(parameter, *tensors, lr=group["lr"]))
        for (processes, _), matrices in by_kind.items():
            _step(matrices, processes)

    def _momentum(self, parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter, requires_grad=False)
        return state["momentum_buffer"]

    def _processes(self, parameter: Tensor) -> _Processes:
        if not isinstance(parameter, DTensor):
            return _Processes(self._copies, None)
        mesh = parameter.device_mesh
        copies = mesh.get_group(0) if mesh.ndim > 1 else None
        return _Processes(copies, mesh.get_group(mesh.ndim - 1) if parameter.dim() == 2 else None)


class MuonWithAdamW(Optimizer):
    """Muon for some groups and another optimizer for the others, in one optimizer.

    Args:
        muon: steps the matrices.
        others: steps all other parameters.
    """

    def __init__(self, muon: Muon, others: Optimizer) -> None:
        self._parts = (muon, others)
        super().__init__([group for part in self._parts for group in part.param_groups], {})
        self.defaults = others.defaults
        for part in self._parts:
            part.state = self.state

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Takes one step of both optimizers."""
        for part in self._parts:
            part.step()


def matrices_of(model: nn.Module) -> set[int]:
    """Returns the `id` of each weight that Muon steps: the matrices in lists of blocks, including experts.

    Embeddings, heads, norms and biases are left out: their rows or entries are independent of each other.

    Args:
        model: a model, or the list of stages of a pipeline process.

    Raises:
        UserError: the model trains no such weights.
    """
    found = {
        id(parameter)
        for part in (model if isinstance(model, nn.ModuleList) else [model])
        for blocks in (module for module in part.modules() if isinstance(module, nn.ModuleList))
        for name, module in blocks.named_modules()
        for parameter in module.parameters(recurse=False)
        if parameter.requires_grad
        and not isinstance(module, nn.Embedding)
        and (parameter.dim() == 2 or (parameter.dim() == 3 and name.endswith("experts")))
    }
    if not found:
        message = "train.optimizer: muon is for the matrices of a model's repeated blocks, and this model trains none"
        raise UserError(Problem(message, "write `optimizer: adamw`"))
    return found


def _matrices_in(
    parameter: Tensor, weights: Tensor, gradients: Tensor, momenta: Tensor, *, lr: float
) -> Iterator[_Matrices]:
    """Yields the matrices of a parameter, of which this process has some rows, or some experts whole."""
    rows, columns = parameter.shape[-2:]
    of_experts = parameter.dim() == 3
    experts = max(1, EXPERTS_AT_ONCE // (rows * columns))
    parts = ((x if of_experts else x[None]).split(experts) for x in (weights, gradients, momenta))
    for weight, gradient, momentum in zip(*parts, strict=True):
        if len(weight):
            step = lr * RMS * math.sqrt(max(rows, columns))
            yield _Matrices(weight, gradient, momentum, rows=rows, step=step)


def _step(matrices: list[_Matrices], processes: _Processes) -> None:
    """Steps matrices that are held by the same processes, some at a time."""
    copies, shards = (
        1 if group is None else dist.get_world_size(group) for group in (processes.copies, processes.shards)
    )
    matrices = sorted(matrices, key=lambda some: -some.cost)
    owners = iter(balanced([some.cost for some in matrices], copies * shards))
    most = max(AT_ONCE, copies * shards * max((some.size for some in matrices), default=0))
    for together in grouped(matrices, lambda some: some.size, most):
        owning = [divmod(next(owners), shards) for _ in together]
        for index, start, update_N in _updates(together, owning, processes):
            some = together[index]
            flat_N = some.weights.reshape(-1)  # a copy where they are not contiguous
            flat_N[start : start + len(update_N)].add_(update_N, alpha=-some.step)
            if not some.weights.is_contiguous():
                some.weights.copy_(flat_N.view_as(some.weights))


def _updates(
    matrices: list[_Matrices], owners: list[tuple[int, int]], processes: _Processes
) -> Iterator[tuple[int, int, Tensor]]:
    """Yields pieces of the orthogonalised updates; see `on_owners`.

    Args:
        owners: for each of the matrices, a rank in ``processes.copies`` and one in ``processes.shards``.
    """
    dtype = _arithmetic(matrices[0].weights)

    def work(indices: list[int]) -> list[Tensor]:
        mine = [matrices[i] for i in indices]
        return on_gathered_rows(
            partial(orthogonalised_together, dtype=dtype),
            _nesterov(mine, dtype),
            [some.rows for some in mine],
            [owners[i][1] for i in indices],
            processes.shards,
        )

    like = [some.weights for some in matrices]
    return on_owners(work, like, [copy for copy, _ in owners], processes.copies, dtype=dtype, at_once=AT_ONCE)


def _nesterov(matrices: list[_Matrices], dtype: torch.dtype) -> list[Tensor]:
    """Returns what is orthogonalised; wider copies are freed before the iterations."""
    wide = torch._foreach_lerp([some.gradients for some in matrices], [some.momenta for some in matrices], MOMENTUM)
    return [x.to(dtype) for x in wide]


def _arithmetic(x: Tensor) -> torch.dtype:
    """Returns the dtype of the iterations: bfloat16 on a GPU, where it is accurate enough and fast."""
    return torch.bfloat16 if x.device.type == "cuda" and x.dtype == torch.float32 else x.dtype
