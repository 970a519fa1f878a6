"""Muon: momentum whose update of each matrix is orthogonalised (Jordan et al., 2024).

Shapes: R rows, C columns of a matrix; E experts, whose matrices lie in one tensor.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from stoker.errors import Problem, UserError
from stoker.parallel.offload import Groups

MOMENTUM = 0.95
RMS = 0.2  # of an update's entries, as AdamW's have it: its learning rate serves (Liu et al., 2025, arXiv:2502.16982)
COEFFICIENTS = (3.4445, -4.775, 2.0315)  # of the quintic whose slope at zero is largest
STEPS, EPS = 5, 1e-7


class Muon(Optimizer):
    """Muon with Nesterov momentum and decoupled weight decay, over matrices of shape (R, C) or (E, R, C).

    Sharded matrices are gathered for the step, and every process orthogonalises all of them.
    """

    def __init__(self, groups: Groups, lr: float) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step. Parameters without a gradient do not change."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, group["lr"], group["weight_decay"])

    def _step(self, parameter: Tensor, lr: float, weight_decay: float) -> None:
        state, gradient = self.state[parameter], parameter.grad
        assert gradient is not None
        if not state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        momentum = state["momentum_buffer"].lerp_(gradient, 1 - MOMENTUM)
        update = _whole_update(gradient.lerp(momentum, MOMENTUM))
        size = RMS * math.sqrt(max(parameter.shape[-2:]))
        parameter.mul_(1 - lr * weight_decay).add_(update, alpha=-lr * size)


class MuonWithAdamW(Optimizer):
    """Muon for some groups and another optimizer for the others, as one.

    Args:
        muon: of the matrices.
        others: of all else.
    """

    def __init__(self, muon: Muon, others: Optimizer) -> None:
        self._parts = (muon, others)
        super().__init__([group for part in self._parts for group in part.param_groups], {})
        self.defaults = others.defaults
        for part in self._parts:
            part.state = self.state

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step of both."""
        for part in self._parts:
            part.step()


def matrices_of(model: nn.Module) -> set[int]:
    """The `id` of each weight that Muon is for: the matrices in lists of blocks, experts' among them.

    Embeddings, heads, norms and biases are not: their rows or entries stand for themselves.

    Args:
        model: or a list of the stages that a process of a pipeline has.

    Raises:
        UserError: it has no such weights that are trained.
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


def orthogonalised(x: Tensor, dtype: torch.dtype) -> Tensor:
    """About U V^T where x = U S V^T, by five Newton-Schulz iterations: singular values become 0.7 to 1.2.

    Args:
        x: shape (..., R, C).
        dtype: in which it is computed.
    """
    a, b, c = COEFFICIENTS
    tall = x.shape[-2] > x.shape[-1]
    y = x.mT.to(dtype) if tall else x.to(dtype)
    y = y / y.norm(dim=(-2, -1), keepdim=True).clamp(min=EPS)
    for _ in range(STEPS):
        gram = y @ y.mT
        y = a * y + (b * gram + c * gram @ gram) @ y
    return y.mT if tall else y


def _whole_update(update: Tensor) -> Tensor:
    """Orthogonalises a matrix, of which each process may have a shard."""
    if not isinstance(update, DTensor):
        return orthogonalised(update, _arithmetic(update)).to(update.dtype)
    whole = update.full_tensor()
    done = orthogonalised(whole, _arithmetic(whole)).to(update.dtype)
    replicated = DTensor.from_local(done, update.device_mesh, [Replicate()] * update.device_mesh.ndim, run_check=False)
    return replicated.redistribute(placements=update.placements)


def _arithmetic(x: Tensor) -> torch.dtype:
    """bfloat16 is enough, and fast on a GPU."""
    return torch.bfloat16 if x.device.type == "cuda" and x.dtype == torch.float32 else x.dtype
