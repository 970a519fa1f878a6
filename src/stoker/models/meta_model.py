"""Models with their parameters on the meta device, until each process knows its part of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

META = torch.device("meta")
CONSTRUCTED = "constructed_scalars"  # attribute of a module: the values that its constructor gave scalars, by name


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """A context that builds modules with their parameters on the meta device and real buffers.

    So buffers that no checkpoint contains (rotary frequencies, masks) are computed by the modules' own code. Scalar
    parameters are also kept as they were constructed, under `CONSTRUCTED`. The random state is restored afterwards.
    """
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is not None and not parameter.is_meta:
            # A parameter that is registered twice stays shared on the meta device.
            known = parameter.__dict__.setdefault("on_meta", nn.Parameter(parameter.to(META), parameter.requires_grad))
            module._parameters[name] = known
            if parameter.numel() == 1:
                module.__dict__.setdefault(CONSTRUCTED, {})[name] = parameter.detach().float()

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign, assignment]
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def allocate(model: nn.Module, device: torch.device, *, offload: bool = False) -> dict[str, nn.Parameter]:
    """Gives the parameters on the meta device uninitialised memory on a device, and moves all other tensors there.

    Shared parameters stay shared. Parameters are new objects afterwards, except those of ``fully_shard``. A model
    that has all its values, such as a quantised one, is not moved.

    Args:
        offload: whether the parameters get host memory, and only the other tensors move to the device.

    Returns:
        The parameters without values, by name.
    """
    blank = {name for name, parameter in model.named_parameters() if parameter.is_meta}
    if not blank:
        return {}
    names_of: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names_of.setdefault(id(parameter), []).append(name)
    memory = torch.device("cpu") if offload else device
    model._apply(lambda t: torch.empty_like(t, device=memory) if t.is_meta else t.to(device))
    for first, *others in names_of.values():
        shared = model.get_parameter(first)
        for other in others:
            set_parameter(model, other, shared)
    return {name: parameter for name, parameter in model.named_parameters() if name in blank}


def set_parameter(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Replaces a parameter by its name."""
    path, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(path), leaf, parameter)


def name_groups(model: nn.Module) -> list[tuple[str, ...]]:
    """Returns the names of each parameter and persistent buffer, in order; shared ones have several."""
    names: dict[Tensor, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        names.setdefault(tensor, []).append(name)
    return [tuple(group) for group in names.values()]
