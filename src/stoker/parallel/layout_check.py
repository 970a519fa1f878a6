"""Checks whether a model can have a layout, before any process starts."""

from __future__ import annotations

from typing import Any

from torch import nn

from stoker.errors import Problem
from stoker.job.layout import Layout
from stoker.job.load_job import LoadedJob
from stoker.models.attention.long_rope import has_long_rope
from stoker.models.families import FAMILIES, family_of
from stoker.models.families.facts import Family, Region, regions_of
from stoker.models.families.facts_check import placement_problem
from stoker.parallel.tensor_parallel.head_split import group_of, share_heads


def layout_problem(model: Any, layout: Layout, loaded: LoadedJob) -> Problem | None:
    """Returns why a causal language model cannot have a layout, at the key that requests it; None if it can.

    Args:
        model: on the meta device, its fused layers split.
    """
    axes = {"tensor": layout.tensor, "pipeline": layout.pipeline, "context": layout.context}
    asked = [axis for axis, size in axes.items() if size > 1]
    if not asked:
        return None
    family = family_of(model.config)
    if family is None:
        message = (
            f"parallel.{asked[0]}: nothing is known about how to split a model of the family "
            f"{model.config.model_type!r}; docs/families.md lists the {len(FAMILIES)} families that are known"
        )
        return loaded.problem(
            f"parallel.{asked[0]}", message, "write `data` and `shard` instead, which any model can have"
        )
    for axis in asked:
        if axis in family.refused:
            message = f"parallel.{axis}: {family.name} cannot be split so: {family.refused[axis]}"  # type: ignore[index]
            return loaded.problem(f"parallel.{axis}", message)
        for (refused, key), reason in family.refused_with.items():
            name, _, entry = key.partition("=")
            value = getattr(model.config, name, None)
            if refused == axis and value and (not entry or entry in value):
                message = f"parallel.{axis}: {family.name} with `{key.replace('=', ': ')}` cannot be split so: {reason}"
                return loaded.problem(f"parallel.{axis}", message)
    found = placement_problem(model, family)
    if found is not None:
        return loaded.problem(f"parallel.{asked[0]}", f"parallel.{asked[0]}: {found}")
    return (
        _frequencies(model.config, layout, loaded)
        or _ends(model, layout, asked[0], loaded)
        or _heads(model, family, layout, loaded)
        or _groups_of_heads(model.config, family, layout, loaded)
        or _noise(model.config, layout, loaded)
        or _experts(model, family, layout, loaded)
        or _blocks(model, family.blocks, layout, loaded)
    )


def _frequencies(config: Any, layout: Layout, loaded: LoadedJob) -> Problem | None:
    """Each process of a row would choose the frequencies of rotary embeddings by its own highest position.

    The type ``dynamic`` changes them only above `max_position_embeddings`, which no row exceeds.
    """
    if layout.context == 1 or not has_long_rope(config):
        return None
    text = config.get_text_config()
    built_for = text.rope_parameters["original_max_position_embeddings"]
    if min(loaded.job.train.seq_len, text.max_position_embeddings) <= built_for:  # a default above it is lowered
        return None
    message = (
        "parallel.context: rotary embeddings of the type longrope depend on a row's length, of which each process "
        f"has a part, above {built_for} tokens"
    )
    return loaded.problem("parallel.context", message, f"write train.seq_len: {built_for}, or `tensor` instead")


def _ends(model: Any, layout: Layout, axis: str, loaded: LoadedJob) -> Problem | None:
    if layout.tensor == 1 and layout.pipeline == 1:
        return None
    if type(model.get_output_embeddings()) is not nn.Linear:
        return loaded.problem(f"parallel.{axis}", f"parallel.{axis}: the model's head is not a plain linear layer")
    if not isinstance(model.get_input_embeddings(), nn.Embedding):
        message = f"parallel.{axis}: the model's embedding has an adapter, and cannot be split with it"
        return loaded.problem(f"parallel.{axis}", message, "train it whole instead, by tune.modules_to_save")
    return None


def _heads(model: Any, family: Family, layout: Layout, loaded: LoadedJob) -> Problem | None:
    groups = {group_of(block, family) for block in model.get_submodule(family.blocks).children()}
    problems = (_heads_in_groups(model.config, group, layout, loaded) for group in sorted(groups, key=str))
    return next((problem for problem in problems if problem), None)


def _heads_in_groups(config: Any, group: int | None, layout: Layout, loaded: LoadedJob) -> Problem | None:
    """The problem of blocks in which groups of query heads share a key-value head; see `share_heads`."""
    heads = config.num_attention_heads
    shared = heads // group if group else getattr(config, "num_key_value_heads", None) or heads
    shares = [share_heads(config, layout.tensor, index, group=group) for index in range(layout.tensor)]
    if None in shares:
        possible = [n for n in range(1, heads + 1) if share_heads(config, n, 0, group=group)]
        return loaded.problem(
            "parallel.tensor",
            f"parallel.tensor: {heads} attention heads with {shared} of keys and values cannot be shared out over "
            f"{layout.tensor} processes",
            f"write {min(possible, key=lambda n: abs(n - layout.tensor))}",
        )
    own = {share.queries[1] - share.queries[0] for share in shares if share}
    if layout.context_by == "ulysses" and any(count % layout.context for count in own):
        odd = next(count for count in own if count % layout.context)
        return loaded.problem(
            "parallel.context",
            f"parallel.context: ulysses exchanges heads, and {odd} cannot be split over {layout.context} processes",
            "write `context_by: gather`",
        )
    return None


def _groups_of_heads(config: Any, family: Family, layout: Layout, loaded: LoadedJob) -> Problem | None:
    """Linear attention has whole groups of value heads with their key head."""
    for region in family.regions:
        own = region.head_counts != Region.head_counts
        groups = getattr(config, region.head_counts[1], None) if own else None
        if groups and groups < layout.tensor:
            message = (
                f"parallel.tensor: {groups} key heads of linear attention cannot be shared out over {layout.tensor} "
                "processes"
            )
            return loaded.problem("parallel.tensor", message, f"write {groups} or less")
    return None


def _noise(config: Any, layout: Layout, loaded: LoadedJob) -> Problem | None:
    """Routers see the same tokens on all tensor processes, which draw different numbers under sequence parallelism."""
    if not layout.sequence or not any(getattr(config, f"{name}_jitter_noise", 0) for name in ("router", "input")):
        return None
    message = "parallel.sequence: the routers of this model draw random numbers, which its processes must share"
    return loaded.problem("parallel.tensor", message, "write `sequence: false`")


def _experts(model: nn.Module, family: Family, layout: Layout, loaded: LoadedJob) -> Problem | None:
    """Every process needs an expert: the products of experts fail without any."""
    counts: list[int] = [
        module.num_experts  # type: ignore[misc]  # an int
        for block in model.get_submodule(family.blocks).children()
        for region in regions_of(block, family)
        if region.experts
        for module in block.get_submodule(region.experts).modules()
        if hasattr(module, "num_experts")
    ]
    fewest = min(counts, default=layout.tensor)
    if fewest >= layout.tensor:
        return None
    message = f"parallel.tensor: {fewest} experts cannot be shared out over {layout.tensor} processes"
    return loaded.problem("parallel.tensor", message, f"write {fewest} or less")


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
