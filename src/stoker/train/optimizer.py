"""The optimizer: torch's own, with weight decay on matrices only."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Adafactor, AdamW, Optimizer

from stoker.checkpoint.weights import trainable
from stoker.job.schema import TrainBlock


def build_optimizer(model: nn.Module, train: TrainBlock) -> Optimizer:
    """The job's optimizer over the trained parameters.

    Biases and norm weights (fewer than two dimensions) are not decayed, as in GPT-3 (Brown et al., 2020).
    """
    assert train.lr != "auto" and train.weight_decay != "auto" and train.beta2 != "auto"
    parameters = trainable(model)
    groups = [
        {"params": [p for p in parameters.values() if p.dim() >= 2], "weight_decay": train.weight_decay},
        {"params": [p for p in parameters.values() if p.dim() < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if train.optimizer == "adamw":
        fused = all(p.device.type in ("cuda", "cpu") and p.is_floating_point() for p in parameters.values())
        return AdamW(groups, lr=train.lr, betas=(train.beta1, train.beta2), eps=train.eps, fused=fused)
    if train.optimizer == "adafactor":
        return Adafactor(groups, lr=train.lr)
    return SGD(groups, lr=train.lr, momentum=train.beta1)


def optimizer_tensors(model: nn.Module, optimizer: Optimizer) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The optimizer's state by parameter name: its tensors, and the numbers among them."""
    tensors, numbers = {}, {}
    for name, parameter in trainable(model).items():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                tensors[f"{name}/{key}"] = value
            elif value is not None:
                numbers[f"{name}/{key}"] = value
    return tensors, numbers


def restore_optimizer(
    model: nn.Module, optimizer: Optimizer, tensors: dict[str, torch.Tensor], numbers: dict[str, Any]
) -> None:
    """Puts back what `optimizer_tensors` took."""
    parameters = trainable(model)
    for full, value in {**tensors, **numbers}.items():
        name, key = full.rsplit("/", 1)
        parameter = parameters[name]
        # Step counters stay on the CPU, but those of a fused optimizer lie beside the parameters.
        moves = isinstance(value, torch.Tensor) and (value.dim() > 0 or optimizer.defaults.get("fused"))
        optimizer.state[parameter][key] = value.to(parameter.device) if moves else value
