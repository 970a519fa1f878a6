"""The parameters on a process of a pipeline: split by tensor parallelism, its experts, its trained ones."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from stoker.plan.matmul import STACKED, Matmul
from stoker.plan.setting import Setting
from stoker.plan.shape import Layer, Shape
from stoker.plan.trainable_params import all_whole_elements, end_elements, is_trained

MOST_PACKED = 2**31 - 1  # weights of experts that are one tensor


@dataclass(frozen=True)
class ParamPlacement:
    """Parameters of one stage on one process, before data-parallel sharding.

    Attributes:
        experts: those of routed experts: only processes with the same experts can shard them.
    """

    dense: float
    experts: float = 0.0

    @property
    def total(self) -> float:
        return self.dense + self.experts

    def share(self, over: int, *, expert: int) -> float:
        """Returns the parameters of one process, sharded over ``over`` processes that see different tokens."""
        return self.dense / over + self.experts / max(1, over // expert)


def sharded(setting: Setting, parameters: ParamPlacement) -> float:
    """Returns the parameters of one process under the layout's sharding."""
    return parameters.share(setting.layout.sharers, expert=setting.expert)


def stepped_parameters(setting: Setting) -> float:
    """Returns the parameters that the optimizer steps in one process of the stage that has the most."""
    return sharded(setting, trained_parameters(setting, most_held(setting)))


def held_parameters(setting: Setting, stage: int) -> ParamPlacement:
    """Parameters of a process of the pipeline."""
    return _held_by_all(setting)[stage]


def trained_parameters(setting: Setting, held: ParamPlacement, stage: int | None = None) -> ParamPlacement:
    """Returns the trained parameters among those on a process; under adapters, its part of the adapters.

    Args:
        stage: the process of the pipeline; by default the one that trains most.
    """
    work = setting.work
    if work.tuning == "full":
        return held
    layers = all_whole_elements(work.shape, work.adapters)
    own = (work.trained - layers) / setting.layout.tensor / setting.layout.pipeline
    if not layers:
        return ParamPlacement(own)
    stages = range(setting.layout.pipeline) if stage is None else (stage,)
    return ParamPlacement(own + max(trained_whole(setting, at) for at in stages))


def trained_whole(setting: Setting, stage: int) -> float:
    """Returns the parameters of a pipeline process whose layers are trained in full beside adapters."""
    layout, shape, adapters = setting.layout, setting.shape, setting.work.adapters
    into, head = end_elements(shape, adapters)
    at_start, at_end = stage == 0, stage == setting.last
    once = shape.tied and at_start  # an embedding that is the head as well
    others = all_whole_elements(shape, adapters) - into - head * (not shape.tied)
    return (into * at_start + head * (at_end and not once) + others / layout.pipeline) / layout.tensor


def packed_parameters(setting: Setting, stage: int) -> ParamPlacement:
    """Quantised parameters of a pipeline process, which are in its blocks."""
    packed = [(packed_of_block(setting, layer), count) for layer, count in setting.blocks[stage].items()]
    return ParamPlacement(sum(p.dense * count for p, count in packed), sum(p.experts * count for p, count in packed))


def packed_of_block(setting: Setting, layer: Layer) -> ParamPlacement:
    """Returns the quantised parameters of one block on one process."""
    dense = experts = 0.0
    for m in packed_matmuls(setting, layer):
        held = m.copies * m.inputs * m.outputs
        if m.copies > 1:
            experts += held / setting.expert
        else:
            dense += held / (1 if m.split == "replicated" else setting.layout.tensor)
    return ParamPlacement(dense, experts)


def packed_matmuls(setting: Setting, layer: Layer) -> list[Matmul]:
    """Returns the products of one block whose matrices are quantised.

    Those of experts are in 4 bits, unless they are trained (see `stoker.models.tuning.packed_experts`).
    """
    work = setting.work
    if work.base == "none":
        return []
    return [
        m
        for m in setting.shape.matmuls(layer)
        if m.name not in STACKED
        or (
            m.copies > 1
            and work.base == "4bit"
            and m.copies * m.inputs * m.outputs <= MOST_PACKED
            and not is_trained(setting.shape, m, work.adapters)
        )
    ]


def most_held(setting: Setting) -> ParamPlacement:
    """Returns the parameters of the stage that has the most."""
    return max(_held_by_all(setting), key=lambda held: held.total)


def _held_by_all(setting: Setting) -> tuple[ParamPlacement, ...]:
    return _held(setting.shape, setting.stages, setting.homes, setting.layout.tensor, setting.expert)


@lru_cache(maxsize=4096)
def _held(
    shape: Shape, stages: tuple[range, ...], homes: tuple[tuple[int, ...], ...], tensor: int, expert: int
) -> tuple[ParamPlacement, ...]:
    kinds = {shape.layer(i) for i in range(shape.layers)}
    sizes = {layer: block_parameters(shape, layer, tensor=tensor, expert=expert) for layer in kinds}
    dense = [sum(sizes[shape.layer(i)].dense for i in stage) for stage in stages]
    experts = [sum(sizes[shape.layer(i)].experts for i in stage) for stage in stages]
    dense[0] += shape.embedding_parameters / tensor + shape.outside_vectors  # whole on each tensor process
    dense[-1] += shape.final_norm_parameters + shape.head_parameters / tensor
    ends_apart = not any(0 in own and len(stages) - 1 in own for own in homes)
    if shape.tied and ends_apart:  # a copy of the embedding
        dense[-1] += shape.head_matmul().parameters / tensor
    return tuple(
        ParamPlacement(sum(dense[stage] for stage in own), sum(experts[stage] for stage in own)) for own in homes
    )


@lru_cache(maxsize=4096)
def block_parameters(shape: Shape, layer: Layer, *, tensor: int, expert: int) -> ParamPlacement:
    """Returns parameters of one block on one process: matrices are split, experts divided, vectors replicated."""
    dense, experts = float(shape.vectors(layer)), 0.0
    for matmul in shape.matmuls(layer):
        held = matmul.parameters / (1 if matmul.split == "replicated" else tensor)
        if matmul.copies > 1:
            experts += held / expert
        else:
            dense += held
    return ParamPlacement(dense, experts)
