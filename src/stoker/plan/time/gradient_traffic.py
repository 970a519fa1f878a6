"""Collectives of gradients and weights in an optimizer step: their seconds, total and exposed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from stoker.plan.memory.stoker_memory import weight_bytes
from stoker.plan.param_placement import most_held, trained_parameters
from stoker.plan.setting import Setting
from stoker.plan.time.efficiency import Efficiency
from stoker.plan.time.network_cost import CollectiveGroup, Kind, collective_seconds

Beside = Literal["forward", "backward", "last", "nothing"]


@dataclass(frozen=True)
class Collective:
    """Collectives of one kind in a step.

    Attributes:
        seconds: of all of them.
        beside: the passes that can overlap with them: forward or backward passes, those backward of the last
            micro-batch, or none.
    """

    kind: Kind
    seconds: float
    beside: Beside


@dataclass(frozen=True)
class GradientTraffic:
    """Collectives of gradients and weights in a step.

    Attributes:
        collectives: those that take time.
        exposed: seconds of the step that no pass hides.
    """

    collectives: tuple[Collective, ...] = ()
    exposed: float = 0.0

    @property
    def hidden(self) -> tuple[float, ...]:
        """Seconds of each collective that passes hide: the same share of all that can be hidden."""
        able = sum(each.seconds for each in self.collectives if each.beside != "nothing")
        rest = sum(each.seconds for each in self.collectives) - self.exposed
        share = max(0.0, rest) / able if able else 0.0
        return tuple(share * each.seconds * (each.beside != "nothing") for each in self.collectives)


def gradient_traffic(setting: Setting, efficiency: Efficiency, *, compute: float, last: float) -> GradientTraffic:
    """Returns the collectives of a step.

    Args:
        compute: seconds of all passes.
        last: seconds of the passes backward of the last micro-batch.
    """
    islands = setting.layout.islands
    if islands == 1:
        return _summed(setting, efficiency, compute=compute, last=last)
    layout = replace(setting.layout, data=setting.layout.data // islands, islands=1)
    inner = _summed(replace(setting, layout=layout), efficiency, compute=compute, last=last)
    group = CollectiveGroup(islands, setting.layout.world // islands)
    outer = 4 * trained_parameters(setting, most_held(setting)).total / layout.sharers
    seconds = collective_seconds("all-reduce", outer, group, setting.cluster, efficiency) / setting.layout.sync_every
    between = _taking_time(Collective("all-reduce", seconds, "nothing"))
    return GradientTraffic(inner.collectives + between, inner.exposed + seconds)


def _sent_share(setting: Setting) -> float:
    """Share of the gradients' bytes in float32 that is sent; PowerSGD's of the model's square matrices."""
    layout = setting.layout
    if layout.compress == "powersgd":
        return min(1.0, 2 * layout.compress_rank / setting.work.shape.width)
    return 0.5 if layout.compress == "bf16" else 1.0


def _summed(setting: Setting, efficiency: Efficiency, *, compute: float, last: float) -> GradientTraffic:
    """Returns the collectives within one island."""
    layout, software, cluster = setting.layout, setting.software, setting.cluster
    data = layout.data * layout.context
    if data == 1:
        return GradientTraffic()
    held = most_held(setting)
    parameters, trained = held.total, trained_parameters(setting, held).total
    inner = layout.sharers if layout.zero else data
    again = layout.pipeline > 1 and cluster.nodes > 1 and layout.shard == "none"
    repeated = software.repeated_sums * setting.micro_batches if again else 0.0
    near = CollectiveGroup(inner, cluster.per_node if repeated > 1 else layout.tensor)
    far = CollectiveGroup(data // inner, layout.tensor * inner)
    # FSDP gathers and scatters block by block; a distributed optimizer in few large buckets.
    units = 1 + max(sum(own.values()) for own in setting.blocks) if layout.zero == 3 or software.by_block else 1
    sent = trained * software.sent_gradients * _sent_share(setting)
    gather = collective_seconds(
        "all-gather", parameters * weight_bytes(setting), near, cluster, efficiency, calls=units
    )
    scatter = collective_seconds("reduce-scatter", sent, near, cluster, efficiency, calls=units)
    across = collective_seconds("all-reduce", sent / inner, far, cluster, efficiency)
    passes = setting.micro_batches
    if layout.shard == "zero3":
        moved = [
            Collective("all-gather", passes * gather, "forward"),
            Collective("all-gather", passes * gather, "backward"),
            Collective("reduce-scatter", passes * scatter, "backward"),
            Collective("all-reduce", across, "last"),
        ]
        return _exposed(setting, moved, beside=compute)
    if layout.shard == "zero2":
        moved = [
            Collective("reduce-scatter", passes * scatter, "backward"),
            Collective("all-gather", gather, "backward"),
        ]
        found = _exposed(setting, moved, beside=compute)
        alone = _taking_time(Collective("all-reduce", across, "nothing"))
        return GradientTraffic(found.collectives + alone, found.exposed + across)
    if layout.shard == "none":
        moved = [
            Collective("all-reduce", collective_seconds("all-reduce", sent, near, cluster, efficiency), "last"),
            Collective("all-reduce", across, "last"),
        ]
    else:
        moved = [
            Collective("reduce-scatter", scatter, "last"),
            Collective("all-reduce", across, "last"),
            Collective("all-gather", gather, "last"),
        ]
    # Stoker's stages have no wrapper that sums beside the backward pass.
    after = layout.pipeline > 1 and layout.shard == "none" and software.memory is None
    if repeated > 1 or after:
        times = max(1.0, repeated)
        alone = _taking_time(*(Collective(each.kind, each.seconds * times, "nothing") for each in moved))
        return GradientTraffic(alone, sum(each.seconds for each in alone))
    return _exposed(setting, moved, beside=last)


def _exposed(setting: Setting, moved: Sequence[Collective], *, beside: float) -> GradientTraffic:
    """Returns the collectives with the seconds that passes of ``beside`` seconds cannot hide."""
    software = setting.software
    seconds = sum(each.seconds for each in moved)
    exposed = max(seconds - software.hidden * beside, seconds * (1 - software.hidden_most))
    return GradientTraffic(_taking_time(*moved), exposed)


def _taking_time(*collectives: Collective) -> tuple[Collective, ...]:
    return tuple(each for each in collectives if each.seconds)
