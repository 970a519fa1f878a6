"""A pipeline's step in time: start and end of every action, and the idle time of each process.

An action starts when its process is free and its input has arrived. Sends overlap with computation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from stoker.plan.pipeline.schedule_order import Kind, Order


class Span(NamedTuple):
    """An action and its time, in seconds from the start of the step."""

    kind: Kind
    stage: int
    micro_batch: int
    start: float
    end: float


@dataclass(frozen=True)
class StageTime:
    """Seconds of a micro-batch in one stage.

    Attributes:
        forward: seconds.
        backward_input: seconds for the gradients of the stage's input, recomputation included.
        backward_weight: seconds for those of its weights.
    """

    forward: float
    backward_input: float
    backward_weight: float

    @property
    def backward(self) -> float:
        """Seconds for all gradients."""
        return self.backward_input + self.backward_weight

    @property
    def parts(self) -> tuple[float, float, float]:
        """Forward, backward for the inputs, backward for the weights."""
        return self.forward, self.backward_input, self.backward_weight

    @property
    def total(self) -> float:
        """Seconds of a micro-batch, both ways."""
        return self.forward + self.backward


@dataclass(frozen=True)
class Timeline:
    """A step in time.

    Attributes:
        processes: each process' actions in order.
    """

    processes: tuple[tuple[Span, ...], ...]

    @cached_property
    def seconds(self) -> float:
        """Time from the start of the first action to the end of the last."""
        return max(spans[-1].end for spans in self.processes)

    @cached_property
    def idle(self) -> tuple[float, ...]:
        """Returns the fraction of the step in which each process is idle."""
        work = [sum(span.end - span.start for span in spans) for spans in self.processes]
        return tuple(1 - busy / self.seconds for busy in work)


def simulate(order: Order, times: Sequence[StageTime], *, send: float = 0.0) -> Timeline:
    """Returns the time of every action of an order.

    Args:
        times: of each stage, first to last; they may differ.
        send: seconds from the end of a pass to its result's arrival on another process.
    """
    home = {action.stage: at for at, actions in enumerate(order) for action in actions}
    last = len(times) - 1
    took = {
        "forward": [t.forward for t in times],
        "backward": [t.backward for t in times],
        "input": [t.backward_input for t in times],
        "weight": [t.backward_weight for t in times],
    }
    way = [0.0 if home[stage] == home[stage + 1] else send for stage in range(last)]  # to the next stage or back
    forward: list[dict[int, float]] = [{} for _ in times]  # when a stage has passed a micro-batch
    backward: list[dict[int, float]] = [{} for _ in times]
    spans: list[list[Span]] = [[] for _ in order]
    next_action, free = [0] * len(order), [0.0] * len(order)
    moved = True
    while moved:
        moved = False
        for at, actions in enumerate(order):
            index, now = next_action[at], free[at]
            while index < len(actions):
                kind, stage, micro_batch = actions[index]
                arrived: float | None = 0.0
                if kind == "forward" and stage:
                    arrived, travel = forward[stage - 1].get(micro_batch), way[stage - 1]
                elif kind in ("backward", "input") and stage < last:
                    arrived, travel = backward[stage + 1].get(micro_batch), way[stage]
                else:  # on the process already
                    travel = 0.0
                if arrived is None:
                    break
                start = max(now, arrived + travel)
                now = start + took[kind][stage]
                if kind == "forward":
                    forward[stage][micro_batch] = now
                elif kind != "weight":
                    backward[stage][micro_batch] = now
                spans[at].append(Span(kind, stage, micro_batch, start, now))
                index += 1
            moved = moved or index > next_action[at]
            next_action[at], free[at] = index, now
    assert [len(actions) for actions in order] == next_action, "the processes wait for each other"
    return Timeline(tuple(map(tuple, spans)))
