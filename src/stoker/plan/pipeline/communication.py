"""A step's communication in time, for each process of the pipeline: its overlap with the passes.

The seconds are those that the step's time consists of. A send begins as its pass ends, less its hidden part.
Exchanges within blocks are spread over their pass. Collectives of gradients and weights overlap with the passes that
hide them, in proportion to the passes' lengths; the exposed rest comes after the last one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from stoker.plan.pipeline.timeline import Span, Timeline
from stoker.plan.setting import Setting
from stoker.plan.time.block_collectives import Axis, block_exchanges
from stoker.plan.time.efficiency import Efficiency, efficiency_of
from stoker.plan.time.gradient_traffic import Beside, GradientTraffic
from stoker.plan.time.network_cost import Kind
from stoker.plan.time.pass_times import PassTimes
from stoker.plan.time.step_time import data_parallel, exposed_send

MessageKind = Literal["send"] | Axis | Kind


@dataclass(frozen=True)
class Message:
    """Communication of one process; times in seconds from the start of the step.

    Attributes:
        stage, micro_batch: of its pass; None if it belongs to all passes.
        start, end: between which it happens.
        seconds: that it takes of them.
        exposed: of these, the seconds in which the process computes nothing else.
    """

    kind: MessageKind
    stage: int | None
    micro_batch: int | None
    start: float
    end: float
    seconds: float
    exposed: float


def communication_of(
    setting: Setting, timeline: Timeline, *, after: float, of: int | None = None
) -> tuple[tuple[Message, ...], ...]:
    """Returns the communication of each process of a pipeline in a step, ordered by start.

    Args:
        after: exposed seconds of the collectives of gradients and weights, as the step's time has them.
        of: micro-batches of the step, if the timeline has fewer.
    """
    efficiency = efficiency_of(setting.cluster.device)
    traffic = data_parallel(setting, PassTimes(efficiency).stages(setting), efficiency)
    drawn = 1 + max(span.micro_batch for spans in timeline.processes for span in spans)
    share = drawn / (of or drawn)
    home = {span.stage: at for at, spans in enumerate(timeline.processes) for span in spans}
    return tuple(
        tuple(
            sorted(
                [
                    *_sends(setting, spans, home, efficiency),
                    *_exchanges(setting, spans, efficiency),
                    *_gradients(traffic, spans, share=share, end=timeline.seconds, after=after),
                ],
                key=lambda message: message.start,
            )
        )
        for spans in timeline.processes
    )


def _sends(setting: Setting, spans: tuple[Span, ...], home: Mapping[int, int], efficiency: Efficiency) -> list[Message]:
    """Results of passes on their way to another process."""
    last, exposed = len(home) - 1, exposed_send(setting, efficiency) if len(home) > 1 else 0.0
    hidden = exposed * (1 / setting.software.exposed_sends - 1) if setting.software.exposed_sends else 0.0
    found = []
    for kind, stage, micro_batch, start, end in spans:
        to = stage + 1 if kind == "forward" else stage - 1
        if kind == "weight" or not 0 <= to <= last or home[to] == home[stage] or not exposed:
            continue
        begin = max(start, end - hidden)
        found.append(Message("send", stage, micro_batch, begin, end + exposed, hidden + exposed, exposed))
    return found


def _exchanges(setting: Setting, spans: tuple[Span, ...], efficiency: Efficiency) -> list[Message]:
    """Returns the exchanges of tensor, expert and context parallelism within the blocks of a pass."""
    layers = {layer: block_exchanges(setting, layer, efficiency) for own in setting.stage_blocks for layer in own}
    again = setting.layout.recompute == "full"
    found = []
    for kind, stage, micro_batch, start, end in spans:
        seconds: dict[Axis, float] = {}
        hidden: dict[Axis, float] = {}
        for layer, count in setting.stage_blocks[stage].items() if kind != "weight" else ():
            for axis, each in layers[layer].items():
                back = each.backward + each.forward * again
                one = each.forward * (1 + setting.work.reads) if kind == "forward" else back
                seconds[axis] = seconds.get(axis, 0.0) + count * one
                hidden[axis] = hidden.get(axis, 0.0) + count * one * each.hidden
        found += [
            Message(axis, stage, micro_batch, start, end, took, took - hidden[axis]) for axis, took in seconds.items()
        ]
    return found


def _gradients(
    traffic: GradientTraffic, spans: tuple[Span, ...], *, share: float, end: float, after: float
) -> list[Message]:
    """Returns data-parallel collectives: a hidden part during passes, the rest from ``end`` for ``after`` seconds."""
    found = []
    for collective, hidden in zip(traffic.collectives, traffic.hidden, strict=True):
        passes = _passes(spans, collective.beside)
        length = sum(span.end - span.start for span in passes)
        spread = hidden * (1.0 if collective.beside == "last" else share)
        for span in passes if spread and length else ():
            took = spread * (span.end - span.start) / length
            found.append(Message(collective.kind, span.stage, span.micro_batch, span.start, span.end, took, 0.0))
    for collective, hidden in zip(traffic.collectives, traffic.hidden, strict=True):
        took = after * (collective.seconds - hidden) / traffic.exposed if traffic.exposed else 0.0
        if took:
            found.append(Message(collective.kind, None, None, end, end + took, took, took))
        end += took
    return found


def _passes(spans: tuple[Span, ...], beside: Beside) -> list[Span]:
    if beside == "forward":
        return [span for span in spans if span.kind == "forward"]
    back = [span for span in spans if span.kind != "forward" and beside != "nothing"]
    last = max((span.micro_batch for span in back), default=0)
    return [span for span in back if beside == "backward" or span.micro_batch == last]
