"""Optimizers: torch's own or Muon, with weight decay on matrices only."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, AdamW, Optimizer

from stoker.checkpoint.chunks import Chunk, chunk_of
from stoker.checkpoint.dcp_store import Saved
from stoker.checkpoint.run_weights import optimized_parameters, trainable
from stoker.errors import Problem, UserError
from stoker.job.resolved import ResolvedTrain
from stoker.models.head import OWN_CRITIC
from stoker.parallel.offload.host_optimizer import Groups, HostOptimizer
from stoker.parallel.shard_spec import NamedShards, Piece
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


def held_moments(model: nn.Module, optimizer: Optimizer, shards: NamedShards) -> dict[str, list[Chunk]]:
    """Returns this process' part of the optimizer's state, by checkpoint name (``optimizer/<parameter>/<moment>``).

    A moment of the parameter's shape, or with one number for several entries of a row, is sharded as the parameter is;
    other state (step counters) is whole.
    """
    held: dict[str, list[Chunk]] = defaultdict(list)
    known = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for name, parameter, piece in optimized_parameters(model, shards):
        assert id(parameter) in known, f"{name} is not stepped: its weights are still gathered (see `reshard`)"
        for moment, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                entries = _entries_a_number(value.shape, parameter.shape)
                box = chunk_of(value, _piece_of_numbers(piece, entries)) if entries else Chunk.whole(value)
                held[f"optimizer/{name}/{moment}"].append(box)
    return dict(held)


@torch.no_grad()
def empty_moments(
    model: nn.Module, optimizer: Optimizer, saved: Mapping[str, Saved], shards: NamedShards
) -> dict[str, list[Chunk]]:
    """Allocates a checkpoint's state in a fresh optimizer, to be filled by `Store.restore`.

    Args:
        saved: entries of the checkpoint.

    Raises:
        UserError: moments were quantised in blocks that this layout's tensor parallelism would split.
    """
    moments: dict[str, dict[str, Saved]] = defaultdict(dict)
    for key, entry in saved.items():
        if key.startswith("optimizer/"):
            name, moment = key.removeprefix("optimizer/").rsplit("/", 1)
            moments[name][moment] = entry
    for name, parameter, piece in optimized_parameters(model, shards):
        optimizer.state[parameter] = {
            moment: _room(name, parameter, piece, entry, fused=bool(optimizer.defaults.get("fused")))
            for moment, entry in moments[name].items()
        }
    return held_moments(model, optimizer, shards)


def _room(name: str, parameter: Tensor, piece: Piece | None, entry: Saved, *, fused: bool) -> Tensor:
    """Allocates memory for this process' part of a saved moment."""
    entries = _entries_a_number(entry.shape, tuple(parameter.shape) if piece is None else piece.shape)
    if entries is None:
        # Step counters stay on the CPU, but a fused optimizer keeps them on the parameters' device.
        device = parameter.device if entry.shape or fused else "cpu"
        return torch.empty(entry.shape, dtype=entry.dtype, device=device)
    if entries > 1 and parameter.shape[-1] % entries:
        message = f"the checkpoint's moments of {name} are in blocks of {entries} entries of a row"
        message += f", and `tensor` gives a process {parameter.shape[-1]} of them"
        raise UserError(Problem(message, "resume with a smaller `tensor`, or as the run was"))
    some = parameter.detach()[..., : parameter.shape[-1] // entries] if entries > 1 else parameter
    return torch.empty_like(some, dtype=entry.dtype, requires_grad=False)


def _entries_a_number(moment: tuple[int, ...], parameter: tuple[int, ...]) -> int | None:
    """Returns the number of entries of a parameter's row per number of a moment; None if shapes do not correspond."""
    if len(moment) != len(parameter) or moment[:-1] != parameter[:-1]:
        return None
    if moment == parameter:
        return 1
    return parameter[-1] // moment[-1] if moment[-1] and parameter[-1] % moment[-1] == 0 else None


def _piece_of_numbers(piece: Piece | None, entries: int) -> Piece | None:
    """Returns a process' piece of a moment that has one number per ``entries`` entries of a row."""
    if piece is None or entries == 1:
        return piece
    of = entries if piece.dim == len(piece.shape) - 1 else 1
    return Piece(piece.dim, piece.start // of, piece.stop // of, (*piece.shape[:-1], piece.shape[-1] // entries))
