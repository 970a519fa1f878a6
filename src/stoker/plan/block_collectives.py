"""Seconds of the collectives within a block: of tensor, expert and context parallelism."""

from __future__ import annotations

from stoker.plan.eager import HALF
from stoker.plan.efficiency import Efficiency
from stoker.plan.network_cost import CollectiveGroup, Kind, collective_seconds
from stoker.plan.setting import Setting
from stoker.plan.shape import Layer


def block_collectives(setting: Setting, layer: Layer, efficiency: Efficiency) -> tuple[float, float]:
    """Seconds (forward, backward) of what is exchanged within a block and not hidden: by tensor, expert and context
    parallelism."""
    shape, layout, software, cluster = setting.shape, setting.layout, setting.software, setting.cluster
    tensor, tokens = layout.tensor, setting.tokens
    kinds: tuple[Kind, ...] = ("all-gather", "reduce-scatter") if layout.sequence else ("all-reduce",)
    group = CollectiveGroup(tensor, 1)
    one = sum(collective_seconds(kind, tokens * shape.width * HALF, group, cluster, efficiency) for kind in kinds)
    exposed = 2 * one * (1 - software.hidden_tensor)
    if setting.expert > 1 and layer.feed_forward == "experts" and shape.mixture is not None:
        moved = tokens * shape.mixture.per_token * shape.width * HALF / (tensor if layout.sequence else 1)
        spread = CollectiveGroup(setting.expert, tensor if tensor < setting.expert else 1)
        there = collective_seconds("all-to-all", moved, spread, cluster, efficiency)
        exposed += 2 * there * (1 - software.hidden_experts)
    exchanged, back = _context(setting, efficiency)
    return exposed + exchanged, exposed + back


def _context(setting: Setting, efficiency: Efficiency) -> tuple[float, float]:
    """Seconds (forward, backward) in which attention comes to see the whole of a row that is split: keys and values of
    all tokens are gathered, their gradients scattered; or queries, keys, values and outputs change from tokens to
    heads and back (Jacobs et al., 2023, section 3.2)."""
    layout, shape = setting.layout, setting.shape
    group = CollectiveGroup(layout.context, layout.tensor)
    own = setting.tokens * HALF / layout.tensor
    if layout.context_by == "ulysses":
        moved = 2 * own * (shape.query_width + shape.key_value_width)
        one = collective_seconds("all-to-all", moved, group, setting.cluster, efficiency)
        return one, one
    keys = 2 * own * layout.context * shape.key_value_width
    gathered, scattered = (
        collective_seconds(kind, keys, group, setting.cluster, efficiency) for kind in ("all-gather", "reduce-scatter")
    )
    return gathered, scattered
