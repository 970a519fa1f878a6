"""The optimizer: torch's own or Muon, with weight decay on matrices only."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, AdamW, Optimizer

from stoker.checkpoint.chunks import Chunk, chunk_of
from stoker.checkpoint.run_weights import NONE, stepped, trainable
from stoker.checkpoint.store import Saved
from stoker.job.resolved import ResolvedTrain
from stoker.models.head import OWN_CRITIC
from stoker.parallel.offload import Groups, HostOptimizer
from stoker.parallel.shard_spec import Piece
from stoker.train.bf16_states import AdamWWithBf16States
from stoker.train.muon import Muon, MuonWithAdamW, matrices_of

# Tensors as large as a parameter that an optimizer keeps, at most; adafactor's are small.
MOMENTS = {"adamw": 2, "muon": 2, "sgd": 1, "adafactor": 0}
SECOND = (".lora_B.", ".lora_embedding_B.")  # in the names of the second LoRA matrices


def build_optimizer(
    model: nn.Module,
    train: ResolvedTrain,
    *,
    on_host: bool = False,
    loraplus_ratio: float = 1.0,
    critic_ratio: float = 1.0,
) -> Optimizer:
    """The job's optimizer over the trained parameters.

    Biases and norm weights (fewer than two dimensions) are not decayed, as in GPT-3 (Brown et al., 2020).

    Args:
        on_host: whether its states lie in the host's memory and it steps there.
        loraplus_ratio: how many times as fast the second LoRA matrices learn (LoRA+: Hayou et al., 2024). Each
            group says its own as ``lr_ratio``.
        critic_ratio: how many times as fast a critic learns that is a model of its own.
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
        if parameters or not any(kinds.values())  # a stage of a pipeline may have nothing that is trained
    ]
    if train.optimizer == "muon":
        groups = _by_kind(groups, matrices_of(model))
    set_rate(groups, train.lr)
    return HostOptimizer(groups, partial(_optimizer, train)) if on_host else _optimizer(train, groups)


def _by_kind(groups: Groups, matrices: set[int]) -> Groups:
    """Each group in two: the matrices that Muon steps, and the rest. There is at least one group of each kind."""
    split: Groups = []
    for own in (True, False):
        halves = [
            {**group, "params": [p for p in group["params"] if (id(p) in matrices) == own], "orthogonalise": own}
            for group in groups
        ]
        split += [half for half in halves if half["params"]] or halves[:1]
    return split


def set_rate(groups: Groups, lr: float) -> None:
    """Gives each group of an optimizer its learning rate, by the base rate."""
    for group in groups:
        group["lr"] = lr * group["lr_ratio"]


def _optimizer(train: ResolvedTrain, groups: Groups) -> Optimizer:
    if train.optimizer == "muon":
        matrices, others = ([g for g in groups if g["orthogonalise"] == own] for own in (True, False))
        return MuonWithAdamW(Muon(matrices, train.lr), _adamw(train, others))
    if train.optimizer == "adamw":
        return _adamw(train, groups)
    if train.optimizer == "adafactor":
        return Adafactor(groups, lr=train.lr)
    return SGD(groups, lr=train.lr, momentum=train.beta1)


def _adamw(train: ResolvedTrain, groups: Groups) -> Optimizer:
    betas = (train.beta1, train.beta2)
    if train.optimizer_states == "bf16":
        return AdamWWithBf16States(groups, lr=train.lr, betas=betas, eps=train.eps)
    parameters = [p for group in groups for p in group["params"]]
    fused = all(p.device.type in ("cuda", "cpu") and p.is_floating_point() for p in parameters)
    return AdamW(groups, lr=train.lr, betas=betas, eps=train.eps, fused=fused)


def held_moments(
    model: nn.Module,
    optimizer: Optimizer,
    pieces: Mapping[str, Piece] = NONE,
    aliases: Mapping[str, str] = NONE,
) -> dict[str, list[Chunk]]:
    """What this process holds of the optimizer's state, as checkpoints name it (``optimizer/<parameter>/<moment>``).

    A moment of the parameter's shape is cut as the parameter is; all else (step counters) is whole.
    For ``pieces`` and ``aliases`` see `stoker.checkpoint.run_weights.stepped`.
    """
    held: dict[str, list[Chunk]] = defaultdict(list)
    known = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for name, parameter, piece in stepped(model, pieces, aliases):
        assert id(parameter) in known, f"{name} is not stepped: its weights are still gathered (see `reshard`)"
        for moment, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                cut = value.shape == parameter.shape
                held[f"optimizer/{name}/{moment}"].append(chunk_of(value, piece) if cut else Chunk.whole(value))
    return dict(held)


@torch.no_grad()
def empty_moments(
    model: nn.Module,
    optimizer: Optimizer,
    saved: Mapping[str, Saved],
    pieces: Mapping[str, Piece] = NONE,
    aliases: Mapping[str, str] = NONE,
) -> dict[str, list[Chunk]]:
    """Makes room in a fresh optimizer for the state that a checkpoint has, to be filled by `Store.restore`.

    Args:
        saved: what the checkpoint holds.
    """
    moments: dict[str, dict[str, Saved]] = defaultdict(dict)
    for key, entry in saved.items():
        if key.startswith("optimizer/"):
            name, moment = key.removeprefix("optimizer/").rsplit("/", 1)
            moments[name][moment] = entry
    for name, parameter, piece in stepped(model, pieces, aliases):
        shape = tuple(parameter.shape) if piece is None else piece.shape
        optimizer.state[parameter] = {
            moment: torch.empty_like(parameter, dtype=entry.dtype, requires_grad=False)
            if entry.shape == shape
            # Step counters stay on the CPU, but those of a fused optimizer lie beside the parameters.
            else torch.empty(
                entry.shape,
                dtype=entry.dtype,
                device=parameter.device if entry.shape or optimizer.defaults.get("fused") else "cpu",
            )
            for moment, entry in moments[name].items()
        }
    return held_moments(model, optimizer, pieces, aliases)
