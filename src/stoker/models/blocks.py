"""The repeated blocks of a model, to which recompute and compile are applied."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn


def blocks_path(model: nn.Module) -> str | None:
    """Returns the path of the module list with the most parameters; None if there is no list."""
    lists = {name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    return max(lists, key=lambda name: sum(p.numel() for p in lists[name].parameters()), default=None)


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Returns the members of the list at `blocks_path`; empty if there is no such list.

    A member without a forward pass of its own, such as a list, is never called: its members are blocks instead.
    """
    path = blocks_path(model)
    return [] if path is None else list(dict.fromkeys(_called_members(model.get_submodule(path))))


def _called_members(holder: nn.Module) -> Iterator[nn.Module]:
    for member in holder.children():
        called = type(member).forward is not nn.Module.forward or "forward" in vars(member)
        yield from [member] if called else _called_members(member)
