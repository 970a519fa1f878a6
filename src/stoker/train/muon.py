"""Muon: momentum with an orthogonalised update of each matrix (Jordan et al., 2024).

Shapes: R rows and C columns of a matrix; E experts, whose matrices are stacked in one tensor.
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
RMS = 0.2  # of an update's entries, as AdamW's: its learning rate fits (Liu et al., 2025, arXiv:2502.16982)
COEFFICIENTS = (3.4445, -4.775, 2.0315)  # of the quintic with the largest slope at zero
STEPS, EPS = 5, 1e-7


class Muon(Optimizer):
    """Muon with Nesterov momentum and decoupled weight decay, over matrices of shape (R, C) or (E, R, C).

    Sharded matrices are gathered for the step, and every process orthogonalises all of them.
    """

    def __init__(self, groups: Groups, lr: float) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Takes one step. Parameters without a gradient do not change."""
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


def orthogonalised(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Approximates U V^T where x = U S V^T, by five Newton-Schulz iterations: singular values become 0.7 to 1.2.

    Args:
        x: shape (..., R, C).
        dtype: dtype of the computation.
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
    """Orthogonalises a matrix that may be sharded over processes."""
    if not isinstance(update, DTensor):
        return orthogonalised(update, _arithmetic(update)).to(update.dtype)
    whole = update.full_tensor()
    done = orthogonalised(whole, _arithmetic(whole)).to(update.dtype)
    replicated = DTensor.from_local(done, update.device_mesh, [Replicate()] * update.device_mesh.ndim, run_check=False)
    return replicated.redistribute(placements=update.placements)


def _arithmetic(x: Tensor) -> torch.dtype:
    """Returns the dtype of the iterations: bfloat16 on a GPU, where it is accurate enough and fast."""
    return torch.bfloat16 if x.device.type == "cuda" and x.dtype == torch.float32 else x.dtype
