"""Pipeline parallelism, first half: a model cut into stretches of blocks, which keep their names."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from stoker.job.layout import Layout
from stoker.models.families.facts import Family


class BlockRange(nn.ModuleList):
    """Some of a list's blocks, in their order, by the numbers that they have in the whole list."""

    def __init__(self, blocks: dict[str, nn.Module]) -> None:
        super().__init__()
        for name, block in blocks.items():
            self.add_module(name, block)

    def __getitem__(self, index: int | slice) -> Any:
        blocks = list(self.children())
        return nn.ModuleList(blocks[index]) if isinstance(index, slice) else blocks[index]


class _Zero(nn.Module):
    """Stands for vectors that have been added on an earlier stage."""

    def forward(self, x: Tensor, *_: Any, **__: Any) -> Tensor:
        return torch.zeros((), device=x.device)


class _Same(nn.Module):
    """Stands for what an earlier or a later stage does."""

    def forward(self, x: Tensor, *_: Any, **__: Any) -> Tensor:
        return x


def blocks_of_stages(layout: Layout, blocks: int) -> list[range]:
    """Which blocks each stage has: as the layout says, else evenly, the first stages getting what is left over."""
    count = layout.stage_count
    sizes = layout.stages or tuple(blocks // count + (i < blocks % count) for i in range(count))
    assert sum(sizes) == blocks and len(sizes) == count
    ends = [sum(sizes[: i + 1]) for i in range(count)]
    return [range(end - size, end) for size, end in zip(sizes, ends, strict=True)]


def stages_of_process(layout: Layout, pipe: int) -> list[int]:
    """Which stages a process of the pipeline has: one; with looped schedules every n-th; in a V, one from each end."""
    if layout.stages_per_process == 1:
        return [pipe]
    if layout.schedule == "zbv":
        return [pipe, layout.stage_count - 1 - pipe]
    return [pipe, pipe + layout.pipeline]


def cut(model: Any, family: Family, blocks: range, *, first: bool, last: bool) -> None:
    """Leaves a causal language model only the given blocks, in place.

    Args:
        first, last: whether the stage has what comes before the blocks, and after them.
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
    if getattr(config, "layer_types", None):  # the model's code counts its blocks from 0
        config.layer_types = [config.layer_types[i] for i in blocks]


def _replace(model: nn.Module, path: str, stand_in: nn.Module) -> None:
    holder, _, name = path.rpartition(".")
    if getattr(model.get_submodule(holder), name, None) is not None:  # OPT has no projections in most sizes
        model.set_submodule(path, stand_in)
