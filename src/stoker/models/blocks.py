"""The repeated blocks of a model, to which recompute and compile are applied."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Returns the members of the module list with the most parameters; empty if there is no such list.

    A member without a forward pass of its own, such as a list, is never called: its members are blocks instead.
    """
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    largest = max(lists, key=lambda blocks: sum(p.numel() for p in blocks.parameters()), default=None)
    return list(dict.fromkeys(_called_members(largest))) if largest is not None else []


def _called_members(holder: nn.Module) -> Iterator[nn.Module]:
    for member in holder.children():
        called = type(member).forward is not nn.Module.forward or "forward" in vars(member)
        yield from [member] if called else _called_members(member)
