"""Optimizers: torch's own or Muon, with weight decay on matrices only."""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, Adafactor, AdamW, Optimizer

from stoker.checkpoint.run_weights import trainable
from stoker.job.resolved import ResolvedTrain
from stoker.models.head import OWN_CRITIC
from stoker.parallel.offload.host_optimizer import Groups, HostOptimizer
from stoker.train.optim.bf16_states import Bf16Moments
from stoker.train.optim.eight_bit_states import EightBitMoments
from stoker.train.optim.held_moments import HeldMoments
from stoker.train.optim.low_precision_adamw import LowPrecisionAdamW
from stoker.train.optim.muon import Muon, MuonWithAdamW, matrices_of

# Most tensors of a parameter's size that an optimizer keeps; adafactor's states are small.
STATE_TENSORS = {"adamw": 2, "muon": 2, "sgd": 1, "adafactor": 0}
HELD: dict[str, HeldMoments] = {"bf16": Bf16Moments(), "8bit": EightBitMoments()}
SECOND = (".lora_B.", ".lora_embedding_B.")  # name parts of the second LoRA matrices


def build_optimizer(
    model: nn.Module,
    train: ResolvedTrain,
    *,
    on_host: bool = False,
    loraplus_ratio: float = 1.0,
    critic_ratio: float = 1.0,
    copies: dist.ProcessGroup | None = None,
) -> Optimizer:
    """Builds the job's optimizer over the trained parameters.

    Biases and norm weights (fewer than two dimensions) are not decayed, as in GPT-3 (Brown et al., 2020).

    Args:
        on_host: whether the states and the step are in host memory.
        loraplus_ratio: learning rate of the second LoRA matrices over that of the first (LoRA+: Hayou et al., 2024).
            Each group stores its ratio as ``lr_ratio``.
        critic_ratio: factor of the learning rate of a critic that is a separate model.
        copies: processes with the same parameters, unless these are sharded.
    """
    kinds: dict[tuple[float, float], list[nn.Parameter]] = {(train.weight_decay, 1.0): [], (0.0, 1.0): []}
    for name, parameter in trainable(model).items():
        decay = train.weight_decay if parameter.dim() >= 2 else 0.0
        ratio = loraplus_ratio if any(second in name for second in SECOND) else 1.0
        ratio *= critic_ratio if name.startswith(f"{OWN_CRITIC}.") else 1.0
        kinds.setdefault((decay, ratio), []).append(parameter)
    groups: Groups = [
        {"params": parameters, "weight_decay": decay, "lr_ratio": ratio}
        for (decay, ratio), parameters in kinds.items()
        if parameters or not any(kinds.values())  # a pipeline stage may have no trained parameters
    ]
    if train.optimizer == "muon":
        groups = _by_kind(groups, matrices_of(model))
    set_rate(groups, train.lr)
    return HostOptimizer(groups, partial(_optimizer, train)) if on_host else _optimizer(train, groups, copies)


def _by_kind(groups: Groups, matrices: set[int]) -> Groups:
    """Splits each group into Muon's matrices and the rest. There is at least one group of each kind."""
    split: Groups = []
    for own in (True, False):
        halves = [
            {**group, "params": [p for p in group["params"] if (id(p) in matrices) == own], "orthogonalise": own}
            for group in groups
        ]
        split += [half for half in halves if half["params"]] or halves[:1]
    return split


def set_rate(groups: Groups, lr: float) -> None:
    """Sets each group's learning rate from the base rate."""
    for group in groups:
        group["lr"] = lr * group["lr_ratio"]


def _optimizer(train: ResolvedTrain, groups: Groups, copies: dist.ProcessGroup | None = None) -> Optimizer:
    if train.optimizer == "muon":
        matrices, others = ([g for g in groups if g["orthogonalise"] == own] for own in (True, False))
        return MuonWithAdamW(Muon(matrices, train.lr, copies), _adamw(train, others))
    if train.optimizer == "adamw":
        return _adamw(train, groups)
    if train.optimizer == "adafactor":
        return Adafactor(groups, lr=train.lr)
    # On a GPU torch would step all parameters at once, with another copy of all gradients for their weight decay.
    return SGD(groups, lr=train.lr, momentum=train.beta1, foreach=False)


def _adamw(train: ResolvedTrain, groups: Groups) -> Optimizer:
    betas = (train.beta1, train.beta2)
    if train.optimizer_states in HELD:
        return LowPrecisionAdamW(groups, HELD[train.optimizer_states], lr=train.lr, betas=betas, eps=train.eps)
    fused = all(has_fused_step(p.device, p.dtype) for group in groups for p in group["params"])
    return AdamW(groups, lr=train.lr, betas=betas, eps=train.eps, fused=fused)


def has_fused_step(device: torch.device, dtype: torch.dtype) -> bool:
    """Returns whether AdamW's fused kernel updates such a parameter.

    That for CUDA reads the step counter as float32, and in float64 mode the counter is float64 too.
    """
    return dtype.is_floating_point and (device.type == "cpu" or (device.type == "cuda" and dtype != torch.float64))
