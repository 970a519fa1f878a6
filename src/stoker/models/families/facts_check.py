"""Checks that a family's facts cover every parameter of a model."""

from __future__ import annotations

from torch import nn

from stoker.models.families.facts import Family, Region, regions_of, submodule
from stoker.models.head import VALUE_HEAD


def placement_problem(model: nn.Module, family: Family) -> str | None:
    """Returns why a model cannot use tensor or pipeline parallelism by its family's facts; None if it can.

    A matrix that no fact names would stay whole in a region where each process computes only a part, and so get only a
    part of its gradient. So every parameter must be named, including those that stay whole.

    Args:
        model: the causal language model itself, its fused layers split.
    """
    blocks = submodule(model, family.blocks)
    if blocks is None:
        return f"{family.name}: there are no blocks at {family.blocks}"
    head = model.get_output_embeddings()  # type: ignore[operator]
    named = {
        family.embedding,
        *family.first,
        *family.last,
        VALUE_HEAD,
        *(n for n, m in model.named_modules() if m is head),
    }
    for index, block in blocks.named_children():
        regions = regions_of(block, family)
        if not regions:
            return f"{family.name}: nothing is known about the layers of {family.blocks}.{index}"
        paths = [path for region in regions for path in _paths(region)]
        named |= {f"{family.blocks}.{index}.{path}" for path in (*paths, *family.whole, *family.per_head)}
    for name, _ in model.named_parameters():
        if not named & _prefixes(name):
            return f"{family.name}: the family's facts say nothing about the parameter {name}"
    return None


def _paths(region: Region) -> tuple[str, ...]:
    return (
        *region.column,
        *region.row,
        *region.shared,
        *region.wide_norms,
        *region.per_head,
        *([region.experts] if region.experts else []),
    )


def _prefixes(name: str) -> set[str]:
    """Returns the path of a parameter, and those of all modules that contain it."""
    parts = name.split(".")
    return {".".join(parts[:i]) for i in range(1, len(parts) + 1)}
