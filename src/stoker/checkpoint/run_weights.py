"""The weights of a model in checkpoints: all that training changes, and how it is restored."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from stoker.checkpoint.chunks import Chunk, Held, chunk_of
from stoker.checkpoint.state import State
from stoker.checkpoint.tensor_names import ISLAND, OUTER
from stoker.errors import Problem, RunFailed, UserError
from stoker.models.head import OWN_CRITIC
from stoker.parallel.data_parallel.shard import reshard
from stoker.parallel.shard_spec import WHOLE, NamedShards, Piece

AVERAGE = "average"  # name of a parameter's average among the optimizer's moments
# Names that are not weights of the model; a separate critic is needed in training only.
FURTHER = ("optimizer/", OUTER, ISLAND, f"model/{OWN_CRITIC}.", f"buffer/{OWN_CRITIC}.")


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the trained parameters by name; a shared one once."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def saved_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Returns the buffers that training may change (batch norm's averages, even with frozen weights), by name."""
    persistent = model.state_dict().keys()
    return {name: b for name, b in model.named_buffers() if name in persistent}


def optimized_parameters(model: nn.Module, shards: NamedShards) -> Iterator[tuple[str, nn.Parameter, Piece | None]]:
    """Yields the parameters that the optimizer steps: name in the whole model, parameter, tensor-parallel piece."""
    reshard(model)
    for name, parameter in trainable(model).items():
        yield shards.aliases.get(name, name), parameter, shards.pieces.get(name)


def held_weights(model: nn.Module, shards: NamedShards) -> dict[str, list[Chunk]]:
    """Returns this process' chunks of the trained weights and the buffers, by checkpoint name."""
    held: dict[str, list[Chunk]] = defaultdict(list)
    for name, parameter, piece in optimized_parameters(model, shards):
        held[f"model/{name}"].append(chunk_of(parameter, piece))
    for name, buffer in saved_buffers(model).items():
        held[f"buffer/{shards.aliases.get(name, name)}"].append(chunk_of(buffer, shards.pieces.get(name)))
    return dict(held)


def held_gradients(model: nn.Module, shards: NamedShards) -> Held:
    """Returns this process' chunks of the gradients, by parameter; parameters without a gradient are left out."""
    held: dict[str, list[Chunk]] = defaultdict(list)
    for name, parameter, piece in optimized_parameters(model, shards):
        if parameter.grad is not None:
            held[name].append(chunk_of(parameter.grad, piece))
    return dict(held)


def with_synchronised_weights(state: State) -> State:
    """Returns a checkpoint with the weights of the islands' last synchronisation; one of no islands as it is."""
    return _with_weights(state, OUTER, "/weights") or state


def with_averaged_weights(state: State) -> State:
    """Returns a checkpoint with its weights replaced by their averages over the steps.

    Raises:
        UserError: the run kept no averages.
    """
    averaged = _with_weights(state, "optimizer/", f"/{AVERAGE}")
    if averaged is None:
        raise UserError(
            Problem("this run kept no average of its weights", "write train.average: 0.99 in its job, and train again")
        )
    return averaged


def _with_weights(state: State, prefix: str, ending: str) -> State | None:
    """Returns a checkpoint with its weights replaced by the tensors of these names; None if there are none."""
    weights = {
        "model/" + key.removeprefix(prefix).removesuffix(ending): tensor
        for key, tensor in state.tensors.items()
        if key.startswith(prefix) and key.endswith(ending)
    }
    return replace(state, tensors={**state.tensors, **weights}) if weights else None


@torch.no_grad()
def restore_weights(model: nn.Module, state: State) -> None:
    """Copies the weights of a checkpoint, read whole, into a model in a single process."""
    saved = {key for key in state.tensors if not key.startswith(FURTHER)}
    places = held_weights(model, WHOLE)
    if saved != set(places):
        odd = sorted(saved ^ set(places))[0]
        raise RunFailed(f"the checkpoint of step {state.step} is of another model: {odd} is only in one of them")
    for key, chunks in places.items():
        whole = state.tensors[key]
        assert isinstance(whole, Tensor)
        chunks[0].tensor.copy_(whole)
