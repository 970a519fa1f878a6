"""Whether a model can be spread as a layout says, found before any process starts on it."""

from __future__ import annotations

from typing import Any

from torch import nn

from stoker.errors import Problem
from stoker.job.layout import Layout
from stoker.job.load import LoadedJob
from stoker.models.families import FAMILIES, family_of
from stoker.models.families.check import placement_problem


def layout_problem(model: Any, layout: Layout, loaded: LoadedJob) -> Problem | None:
    """Why a causal language model cannot have a layout, at the key that asks for it; None where it can.

    Args:
        model: without memory, its fused layers split, adapters inside or not.
    """
    axes = {"tensor": layout.tensor, "pipeline": layout.pipeline, "context": layout.context}
    asked = [axis for axis, size in axes.items() if size > 1]
    if not asked:
        return None
    family = family_of(model.config)
    if family is None:
        known = ", ".join(sorted(FAMILIES))
        message = (
            f"parallel.{asked[0]}: nothing is known about how to split a model of the family "
            f"{model.config.model_type!r} (known: {known})"
        )
        return loaded.problem(
            f"parallel.{asked[0]}", message, "write `data` and `shard` instead, which any model can have"
        )
    for axis in asked:
        if axis in family.refused:
            message = f"parallel.{axis}: {family.name} cannot be split so: {family.refused[axis]}"  # type: ignore[index]
            return loaded.problem(f"parallel.{axis}", message)
    found = placement_problem(model, family)
    if found is not None:
        return loaded.problem(f"parallel.{asked[0]}", f"parallel.{asked[0]}: {found}")
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear and (layout.tensor > 1 or layout.pipeline > 1):
        return loaded.problem(f"parallel.{asked[0]}", f"parallel.{asked[0]}: the model's head is no plain linear layer")
    return _heads(model.config, layout, loaded) or _blocks(model, family.blocks, layout, loaded)


def _heads(config: Any, layout: Layout, loaded: LoadedJob) -> Problem | None:
    heads = config.num_attention_heads
    shared = getattr(config, "num_key_value_heads", None) or heads
    if heads % layout.tensor:
        return loaded.problem(
            "parallel.tensor",
            f"parallel.tensor: {heads} attention heads cannot be split over {layout.tensor} processes",
            f"write {_divisors(heads, layout.tensor)}",
        )
    if shared % layout.tensor and layout.tensor % shared:
        return loaded.problem(
            "parallel.tensor",
            f"parallel.tensor: {shared} key-value heads can be neither split over {layout.tensor} processes "
            "nor repeated on them",
            f"write {_divisors(shared, layout.tensor)}",
        )
    own = heads // layout.tensor
    if layout.context > 1 and layout.context_by == "ulysses" and own % layout.context:
        return loaded.problem(
            "parallel.context",
            f"parallel.context: ulysses exchanges heads, and {own} cannot be split over {layout.context} processes",
            "write `context_by: gather`",
        )
    return None


def _blocks(model: nn.Module, path: str, layout: Layout, loaded: LoadedJob) -> Problem | None:
    blocks = len(list(model.get_submodule(path).children()))
    if layout.pipeline > 1 and blocks < layout.stage_count:
        return loaded.problem(
            "parallel.pipeline",
            f"parallel.pipeline: {blocks} blocks cannot fill {layout.stage_count} stages",
            f"write {max(1, blocks // layout.stages_per_process)} or less",
        )
    if layout.stages and sum(layout.stages) != blocks:
        return loaded.problem(
            "parallel.stages",
            f"parallel.stages: {' + '.join(map(str, layout.stages))} is {sum(layout.stages)}, "
            f"and the model has {blocks} blocks",
        )
    return None


def _divisors(number: int, near: int) -> str:
    found = [d for d in range(2, number + 1) if number % d == 0]
    return str(min(found, key=lambda d: abs(d - near))) if found else "1"
