"""The weights of a model that a checkpoint holds: what training changes, and how it is put back."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from stoker.checkpoint.store import State
from stoker.errors import RunFailed


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that are trained, by name; a shared one once."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def saved_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Buffers that training may change (batch norm's averages, also beside frozen weights), by name."""
    persistent = model.state_dict().keys()
    return {name: b for name, b in model.named_buffers() if name in persistent}


@torch.no_grad()
def restore_weights(model: nn.Module, state: State) -> None:
    """Copies the weights of a checkpoint into the model."""
    places: dict[str, Tensor] = {f"model/{name}": p for name, p in trainable(model).items()}
    places |= {f"buffer/{name}": b for name, b in saved_buffers(model).items()}
    saved = {key for key in state.tensors if not key.startswith("optimizer/")}
    if saved != set(places):
        odd = sorted(saved ^ set(places))[0]
        raise RunFailed(f"the checkpoint of step {state.step} is of another model: {odd} is only in one of them")
    for key, place in places.items():
        place.copy_(state.tensors[key])
