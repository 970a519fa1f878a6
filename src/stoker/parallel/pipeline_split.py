"""Splits a model into pipeline stages, whose blocks keep their names."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from stoker.models.families.facts import Family


class BlockRange(nn.ModuleList):
    """Some of a list's blocks, in order, named by their numbers in the whole list."""

    def __init__(self, blocks: dict[str, nn.Module]) -> None:
        super().__init__()
        for name, block in blocks.items():
            self.add_module(name, block)

    def __getitem__(self, index: int | slice) -> Any:
        blocks = list(self.children())
        return nn.ModuleList(blocks[index]) if isinstance(index, slice) else blocks[index]


class _Zero(nn.Module):
    """Replaces vectors that an earlier stage has added."""

    def forward(self, x: Tensor, *_: Any, **__: Any) -> Tensor:
        return torch.zeros((), device=x.device)


class _Same(nn.Module):
    """Replaces a module of an earlier or a later stage."""

    def forward(self, x: Tensor, *_: Any, **__: Any) -> Tensor:
        return x


def keep_stage_modules(model: Any, family: Family, blocks: range, *, first: bool, last: bool) -> None:
    """Removes what a stage does not compute from a causal language model, in place.

    Args:
        blocks: numbers of the stage's blocks.
        first, last: whether the stage has the modules before the blocks, and those after them.
    """
    whole = model.get_submodule(family.blocks)
    named = dict(whole.named_children())
    model.set_submodule(family.blocks, BlockRange({str(i): named[str(i)] for i in blocks}))
    stands_for = {"absent": nn.Identity, "zero": _Zero, "identity": _Same}
    for path, how in family.first.items() if not first else ():
        _replace(model, path, stands_for[how]())
    if not last:
        for path in family.last:
            _replace(model, path, _Same())
        head = model.get_output_embeddings()
        name = next(name for name, module in model.named_modules() if module is head)
        model.set_submodule(name, nn.Identity())
    config = model.base_model.config = copy.copy(model.base_model.config)
    for path in family.input_factors if not first else ():
        holder, _, name = path.rpartition(".")
        if holder.endswith(".config"):
            setattr(config, name, False)
        else:
            setattr(model.get_submodule(holder), name, 1.0)
    if getattr(config, "layer_types", None):  # the model's code counts its blocks from 0
        config.layer_types = [config.layer_types[i] for i in blocks]


def _replace(model: nn.Module, path: str, stand_in: nn.Module) -> None:
    holder, _, name = path.rpartition(".")
    if getattr(model.get_submodule(holder), name, None) is not None:  # OPT has no projections in most sizes
        model.set_submodule(path, stand_in)
