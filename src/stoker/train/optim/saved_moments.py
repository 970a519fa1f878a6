"""An optimizer's moments in checkpoints: as chunks to save, and as memory to restore into."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stoker.checkpoint.chunks import Chunk, chunk_of
from stoker.checkpoint.dcp_store import Saved
from stoker.checkpoint.run_weights import optimized_parameters
from stoker.errors import Problem, UserError
from stoker.parallel.shard_spec import NamedShards, Piece


def moment_chunks(model: nn.Module, optimizer: Optimizer, shards: NamedShards) -> dict[str, list[Chunk]]:
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
    return moment_chunks(model, optimizer, shards)


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
