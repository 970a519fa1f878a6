"""Seconds of the collectives within a block: of tensor, expert and context parallelism."""

from __future__ import annotations

from typing import Literal, NamedTuple

from stoker.plan.memory.stoker_memory import sent_types
from stoker.plan.setting import Setting
from stoker.plan.shape import Layer
from stoker.plan.time.efficiency import Efficiency
from stoker.plan.time.network_cost import CollectiveGroup, Kind, collective_seconds

Axis = Literal["tensor", "experts", "context"]


class Exchange(NamedTuple):
    """The collectives of one axis within a block.

    Attributes:
        forward, backward: seconds of a pass.
        hidden: fraction of them that overlaps with other work.
    """

    forward: float
    backward: float
    hidden: float = 0.0


def block_exchanges(setting: Setting, layer: Layer, efficiency: Efficiency) -> dict[Axis, Exchange]:
    """Returns the collectives within a block and micro-batch, without recomputation; only those that take time."""
    shape, layout, software, cluster = setting.shape, setting.layout, setting.software, setting.cluster
    tensor, tokens = layout.tensor, setting.tokens
    types = sent_types(setting)
    product = types.product
    group = CollectiveGroup(tensor, 1)

    def seconds(kind: Kind, size: int) -> float:
        return collective_seconds(kind, tokens * shape.width * size, group, cluster, efficiency)

    # Attention and MLP send what products read; experts get and give what a norm gives, which their routers read.
    sizes = (product, types.promoted if layer.feed_forward == "experts" else product)
    kinds: tuple[Kind, ...] = ("all-gather", "reduce-scatter") if layout.sequence else ("all-reduce",)
    one_way = sum(seconds(kind, size) for kind in kinds for size in sizes)
    found: dict[Axis, Exchange] = {"tensor": Exchange(one_way, one_way, software.hidden_tensor)}
    if setting.expert > 1 and layer.feed_forward == "experts" and shape.mixture is not None:
        moved = tokens * shape.mixture.per_token * shape.width * product / (tensor if layout.sequence else 1)
        spread = CollectiveGroup(setting.expert, tensor if tensor < setting.expert else 1)
        there = collective_seconds("all-to-all", moved, spread, cluster, efficiency)
        found["experts"] = Exchange(2 * there, 2 * there, software.hidden_experts)
    found["context"] = Exchange(*_context(setting, efficiency))
    return {axis: exchange for axis, exchange in found.items() if exchange.forward or exchange.backward}


def block_collectives(setting: Setting, layer: Layer, efficiency: Efficiency) -> tuple[float, float]:
    """Returns seconds (forward, backward) of the exposed collectives within a block."""
    found = block_exchanges(setting, layer, efficiency).values()
    return (
        sum(each.forward * (1 - each.hidden) for each in found),
        sum(each.backward * (1 - each.hidden) for each in found),
    )


def _context(setting: Setting, efficiency: Efficiency) -> tuple[float, float]:
    """Returns seconds (forward, backward) of attention over a split row. Either keys and values of all tokens are
    gathered, and their gradients scattered; or queries, keys, values and outputs are exchanged from tokens to heads and
    back (Jacobs et al., 2023, section 3.2).
    """
    layout, shape = setting.layout, setting.shape
    group = CollectiveGroup(layout.context, layout.tensor)
    product = sent_types(setting).product
    own = setting.tokens / layout.tensor
    if layout.context_by == "ulysses":
        moved = own * 2 * product * (shape.query_width + shape.key_value_width)
        one = collective_seconds("all-to-all", moved, group, setting.cluster, efficiency)
        return one, one
    keys = 2 * own * product * layout.context * shape.key_value_width
    gathered, scattered = (
        collective_seconds(kind, keys, group, setting.cluster, efficiency) for kind in ("all-gather", "reduce-scatter")
    )
    return gathered, scattered
