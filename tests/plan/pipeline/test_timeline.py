"""The simulated step of a pipeline, against times worked out by hand and against invariants."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from stoker.job.layout import ScheduleName
from stoker.plan.pipeline.schedule_order import chunks_of, order
from stoker.plan.pipeline.timeline import Span, StageTime, Timeline, simulate

SCHEDULES: list[ScheduleName] = ["gpipe", "1f1b", "interleaved", "zero-bubble", "zbv"]


def test_a_small_step_by_hand() -> None:
    """Two processes, two micro-batches, forward 1 s, backward 2 s, a send 0.5 s."""
    timeline = simulate(order("1f1b", processes=2, micro_batches=2), [StageTime(1, 1, 1)] * 2, send=0.5)
    assert timeline.processes == (
        (
            Span("forward", 0, 0, 0, 1), Span("forward", 0, 1, 1, 2),
            Span("backward", 0, 0, 5, 7), Span("backward", 0, 1, 8, 10),
        ),
        (
            Span("forward", 1, 0, 1.5, 2.5), Span("backward", 1, 0, 2.5, 4.5),
            Span("forward", 1, 1, 4.5, 5.5), Span("backward", 1, 1, 5.5, 7.5),
        ),
    )  # fmt: skip
    assert timeline.seconds == 10
    assert timeline.idle == pytest.approx((0.4, 0.4))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_action_starts_before_its_input_is_there(schedule: ScheduleName) -> None:
    timeline, times, send = uneven(schedule)
    last = len(times) - 1
    home = {span.stage: at for at, spans in enumerate(timeline.processes) for span in spans}
    ends = {span[:3]: span.end for spans in timeline.processes for span in spans}
    for spans in timeline.processes:
        assert all(before.end <= after.start for before, after in pairwise(spans))
        for kind, stage, micro_batch, start, _ in spans:
            if kind == "forward":
                needed = ("forward", stage - 1, micro_batch) if stage else None
            elif kind == "weight":
                needed = ("input", stage, micro_batch)
            else:
                needed = (kind, stage + 1, micro_batch) if stage < last else ("forward", stage, micro_batch)
            if needed is not None:
                assert start >= ends[needed] + (send if home[stage] != home[needed[1]] else 0)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_all_work_is_done_once_and_the_rest_is_idle(schedule: ScheduleName) -> None:
    timeline, times, _ = uneven(schedule)
    micro_batches = 8
    for spans, idle in zip(timeline.processes, timeline.idle, strict=True):
        work = sum(times[stage].total for stage in {span.stage for span in spans}) * micro_batches
        assert sum(span.end - span.start for span in spans) == pytest.approx(work)
        assert len({span[:3] for span in spans}) == len(spans)
        assert timeline.seconds * (1 - idle) == pytest.approx(work)


def uneven(schedule: ScheduleName) -> tuple[Timeline, list[StageTime], float]:
    draw = random.Random(0)
    times = [
        StageTime(draw.uniform(0.5, 2), draw.uniform(0.5, 2), draw.uniform(0.5, 2))
        for _ in range(4 * chunks_of(schedule))
    ]
    return simulate(order(schedule, processes=4, micro_batches=8), times, send=0.3), times, 0.3
