"""The closed forms of pipelines' times, against the simulated step and the published formulas."""

from __future__ import annotations

import random

import pytest

from stoker.job.layout import ScheduleName
from stoker.plan.pipeline.bubble import step_seconds
from stoker.plan.pipeline.schedule_order import order
from stoker.plan.pipeline.timeline import StageTime, simulate

LOOPED: list[tuple[ScheduleName, int]] = [("interleaved", 2), ("interleaved", 4), ("zero-bubble", 2), ("zbv", 2)]
ALL: list[tuple[ScheduleName, int]] = [("gpipe", 1), ("1f1b", 1), ("zero-bubble", 1), *LOOPED]


@pytest.mark.parametrize("processes, micro_batches", [(2, 4), (4, 4), (4, 32), (8, 16)])
def test_published_bubbles(processes: int, micro_batches: int) -> None:
    """Narayanan et al., 2021, section 2.2 (share of the ideal time), and Qi et al., 2023, table 2 (seconds)."""
    time, others = StageTime(1.0, 1.1, 0.9), processes - 1
    sizes = {"processes": processes, "micro_batches": micro_batches}
    ideal = micro_batches * time.total
    for schedule in ("gpipe", "1f1b"):
        assert bubble_seconds(schedule, time, **sizes) == pytest.approx(others * time.total)  # type: ignore[arg-type]
    assert bubble_seconds("interleaved", time, chunks=4, **sizes) / ideal == pytest.approx(others / (4 * micro_batches))
    assert bubble_seconds("zero-bubble", time, chunks=1, **sizes) == pytest.approx(others * (1.0 + 1.1 - 0.9))


@pytest.mark.parametrize("schedule, chunks", ALL)
def test_even_stages_are_exact(schedule: ScheduleName, chunks: int) -> None:
    """Also of fewer micro-batches than fill the pipeline, and of times as recomputation and attention change them."""
    for time in (StageTime(1, 1, 1), StageTime(1, 1.3, 0.8), StageTime(1, 2, 1), StageTime(1, 1, 0)):
        for processes in (2, 4, 8):
            for micro_batches in (processes, 2 * processes, 8 * processes):
                sizes = {"processes": processes, "micro_batches": micro_batches}
                parts = [split(time, 1 / chunks)] * (processes * chunks)
                simulated = simulate(order(schedule, chunks=chunks, **sizes), parts).seconds
                assert step_seconds(schedule, parts, **sizes) == pytest.approx(simulated)


def test_zero_bubble_is_exact_whatever_takes_longest() -> None:
    """ZB-V within 6 % where gradients of inputs do not."""
    for time in (StageTime(1, 2.7, 1.9), StageTime(1, 1.2, 1.8), StageTime(1, 0.7, 1.5), StageTime(1, 0.6, 0.2)):
        for schedule, chunks, most in (("zero-bubble", 1, 1e-9), ("zero-bubble", 2, 1e-9), ("zbv", 2, 0.06)):
            made = order(schedule, processes=8, micro_batches=16, chunks=chunks)  # type: ignore[arg-type]
            simulated = simulate(made, [split(time, 1 / chunks)] * (8 * chunks)).seconds
            waits = bubble_seconds(schedule, time, processes=8, micro_batches=16, chunks=chunks)  # type: ignore[arg-type]
            assert 16 * time.total + waits == pytest.approx(simulated, rel=most)


def test_gpipe_is_exact_for_any_stages_and_sends() -> None:
    assert max(map(abs, errors("gpipe", 1, send=0.1, spread=0.3))) < 1e-9


@pytest.mark.parametrize("send, most", [(0.0, 0.01), (0.1, 0.03)])
def test_1f1b_of_uneven_stages(send: float, most: float) -> None:
    assert max(map(abs, errors("1f1b", 1, send=send, spread=0.3))) < most


@pytest.mark.parametrize("schedule, chunks", LOOPED)
def test_looped_schedules_of_uneven_stages(schedule: ScheduleName, chunks: int) -> None:
    few = errors(schedule, chunks, send=0.05, spread=0.3)
    many = errors(schedule, chunks, send=0.05, spread=0.3, rounds=(4, 8))
    assert max(map(abs, few)) < 0.12 and sum(map(abs, few)) / len(few) < 0.05
    assert max(map(abs, many)) < 0.08 and sum(map(abs, many)) / len(many) < 0.025


def test_one_slow_stage_sets_the_pace_of_1f1b() -> None:
    """All stages once, and the slow last one for each further micro-batch."""
    times = [StageTime(1, 1, 1)] * 7 + [StageTime(1.3, 1.3, 1.3)]
    assert step_seconds("1f1b", times, processes=8, micro_batches=100) == pytest.approx(7 * 3 + 3.9 + 99 * 3.9)


def test_sends_cost_1f1b_more_than_a_round() -> None:
    """Two sends for all but one of p stages at every micro-batch; the interleaved order hides all but the ends."""
    costs = {}
    for schedule, chunks in (("1f1b", 1), ("interleaved", 2)):
        times = [split(StageTime(1, 1, 1), 1 / chunks)] * (4 * chunks)
        took = [simulate(order(schedule, processes=4, micro_batches=m), times, send=0.1).seconds for m in (32, 64)]  # type: ignore[arg-type]
        costs[schedule] = (took[1] - took[0]) / 32 - 3
    assert costs["1f1b"] == pytest.approx(2 * 0.1 * 3 / 4)
    assert costs["interleaved"] == pytest.approx(0)


def bubble_seconds(
    schedule: ScheduleName, time: StageTime, *, processes: int, micro_batches: int, chunks: int = 1
) -> float:
    """Seconds that a process waits in a step of even stages without sends."""
    stages = [split(time, 1 / chunks)] * (processes * chunks)
    return step_seconds(schedule, stages, processes=processes, micro_batches=micro_batches) - micro_batches * time.total


def split(time: StageTime, part: float) -> StageTime:
    return StageTime(time.forward * part, time.backward_input * part, time.backward_weight * part)


def errors(
    schedule: ScheduleName, chunks: int, *, send: float, spread: float, rounds: tuple[int, ...] = (1, 2, 4)
) -> list[float]:
    """Relative errors of the closed form over drawn stages, of which the simulation is the truth."""
    draw, found = random.Random(0), []
    for processes in (2, 4, 8):
        for times_round in rounds * 4:
            micro_batches = processes * times_round
            time = StageTime(1, draw.uniform(1, 2), draw.uniform(0.5, 1))
            stages = [split(time, draw.uniform(1 - spread, 1 + spread) / chunks) for _ in range(processes * chunks)]
            made = order(schedule, processes=processes, micro_batches=micro_batches, chunks=chunks)
            simulated = simulate(made, stages, send=send / chunks).seconds
            closed = step_seconds(
                schedule, stages, processes=processes, micro_batches=micro_batches, send=send / chunks
            )
            found.append(closed / simulated - 1)
    return found


def test_1f1b_is_exact_for_uneven_stages_without_sends() -> None:
    """Also of fewer micro-batches than stages."""
    numbers = random.Random(0)
    for processes in (2, 3, 4, 8):
        for micro_batches in (1, 2, 3, 4, 6, 12):
            times = [StageTime(*(numbers.uniform(0.7, 1.3) for _ in range(3))) for _ in range(processes)]
            made = order("1f1b", processes=processes, micro_batches=micro_batches)
            found = step_seconds("1f1b", times, processes=processes, micro_batches=micro_batches)
            assert found == pytest.approx(simulate(made, times).seconds)


@pytest.mark.parametrize("schedule, chunks", LOOPED)
def test_pipelines_that_never_fill_are_simulated(schedule: ScheduleName, chunks: int) -> None:
    times = [StageTime(1.0, 1.0, 1.0)] * (4 * chunks)
    for micro_batches in (1, 2, 3):
        made = order(schedule, processes=4, micro_batches=micro_batches, chunks=chunks)
        found = step_seconds(schedule, times, processes=4, micro_batches=micro_batches)
        assert found == pytest.approx(simulate(made, times).seconds)
