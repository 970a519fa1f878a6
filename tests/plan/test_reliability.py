"""Interruptions and checkpoints, against published figures and against drawn runs."""

from __future__ import annotations

import random
from math import exp, expm1, log

import pytest

from stoker.plan.reliability import (
    DAY,
    HOUR,
    InterruptionCost,
    daly_interval,
    forecast,
    mean_between,
    young_interval,
)

MONTH = 365.25 * DAY / 12
LLAMA3 = mean_between(419 / (54 * 24 * 16384), 16384)  # Grattafiori et al., 2024, section 3.3.4
RSC1 = mean_between(6.50e-3 / 24 / 8, 16384)  # Kokolis et al., 2024


def test_the_mean_between_interruptions() -> None:
    """Every 3.09 hours at 16,384 devices (Llama 3); RSC-1: 1.8 hours at 16,384 devices, 0.23 at 131,072."""
    hours = [mean / HOUR for mean in (LLAMA3, RSC1)]
    assert hours == pytest.approx([3.09, 1.80], abs=5e-3)
    assert mean_between(6.50e-3 / 24 / 8, 131072) / HOUR == pytest.approx(0.23, abs=6e-3)


@pytest.mark.parametrize(
    "availability, devices, chance", [(0.999, 1000, 0.632), (0.999, 8000, 0.9997), (0.9999, 8000, 0.551)]
)
def test_the_chance_of_an_interruption_in_a_month(availability: float, devices: int, chance: float) -> None:
    mean = mean_between(-log(availability) / (MONTH / HOUR), devices)
    run = forecast(mean, work=MONTH, saving=InterruptionCost(stall=0, recovery=0), interval=0.001 * mean)
    assert run.chance == pytest.approx(chance, abs=5e-4)


def test_checkpoints_of_a_minute_on_16384_devices() -> None:
    """Every 1,155 s, 10.4 % lost, and 2.7 % more for recoveries of five minutes; stalls of 5 s: 3.0 %."""
    interval = young_interval(60, LLAMA3)
    assert interval == pytest.approx(1155, abs=1)
    work = 54 * DAY
    without = forecast(LLAMA3, work=work, saving=InterruptionCost(stall=60, recovery=0), interval=interval)
    with_recovery = forecast(LLAMA3, work=work, saving=InterruptionCost(stall=60, recovery=300), interval=interval)
    assert 60 / interval + interval / (2 * LLAMA3) == pytest.approx(0.104, abs=5e-4)
    assert 1 - without.effective == pytest.approx(0.104, abs=5e-3)  # the first order counts the stalls of all time
    assert without.effective - with_recovery.effective == pytest.approx(0.027 * without.effective, abs=5e-4)
    short = forecast(LLAMA3, work=work, saving=InterruptionCost(stall=5, recovery=0))
    assert 1 - short.effective == pytest.approx(0.030, abs=5e-4)


def test_llama3_trained_more_than_nine_tenths_of_its_time() -> None:
    """With short stalls and recoveries of a few minutes, as the paper says."""
    run = forecast(LLAMA3, work=54 * DAY, saving=InterruptionCost(stall=5, recovery=300, step=10))
    assert 0.90 < run.effective < 0.95


def test_dalys_interval_is_better_than_youngs_where_checkpoints_are_dear() -> None:
    for stall in (10, 300, 1200):
        saving = InterruptionCost(stall=stall, recovery=60)
        daly, young = (
            forecast(HOUR, work=DAY, saving=saving, interval=interval(stall, HOUR)).effective
            for interval in (daly_interval, young_interval)
        )
        tried = (forecast(HOUR, work=DAY, saving=saving, interval=i).effective for i in range(10, 7200, 5))
        assert young <= daly
        assert daly == pytest.approx(max(tried), rel=1e-3)
    assert daly_interval(3 * HOUR, HOUR) == HOUR


def test_the_parts_add_up_to_the_effective_time() -> None:
    run = forecast(RSC1, work=30 * DAY, saving=InterruptionCost(stall=30, recovery=400))
    lost = run.interruptions * (run.recovery + run.recomputation) + run.stalls
    assert run.effective == pytest.approx(1 - lost / run.seconds)
    assert run.seconds == pytest.approx(30 * DAY + lost)


def test_it_is_dalys_complete_model() -> None:
    mean, stall, recovery, interval = HOUR, 200.0, 900.0, 1000.0
    saving = InterruptionCost(stall=stall, recovery=recovery)
    run = forecast(mean, work=10 * DAY, saving=saving, interval=interval)
    complete = mean * exp(recovery / mean) * expm1((interval + stall) / mean) * 10 * DAY / interval
    assert run.seconds == pytest.approx(complete)


@pytest.mark.parametrize(
    "stall, recovery, interval, write", [(30, 300, 600, 0), (5, 60, 900, 0), (5, 60, 900, 400), (5, 60, 300, 500)]
)
def test_drawn_runs_take_as_long(stall: float, recovery: float, interval: float, write: float) -> None:
    saving = InterruptionCost(stall=stall, recovery=recovery, write=write)
    run = forecast(2 * HOUR, work=2000 * HOUR, saving=saving, interval=interval)
    seconds, interruptions = drawn(saving, mean=2 * HOUR, work=2000 * HOUR, interval=interval)
    assert run.seconds == pytest.approx(seconds, rel=0.01)
    assert run.interruptions == pytest.approx(interruptions, rel=0.05)


def drawn(saving: InterruptionCost, *, mean: float, work: float, interval: float) -> tuple[float, int]:
    """(seconds, interruptions) of a run through exponential times between interruptions."""
    draw = random.Random(1)
    now, interruptions, done = 0.0, 0, 0.0  # now: the end of a write, or of a recovery
    first, others = interval + saving.stall + saving.write, max(interval, saving.write) + saving.stall
    cycle = first
    failure = draw.expovariate(1 / mean)
    while done < work:
        end = now + cycle
        if failure >= end:
            now, done, cycle = end, done + interval, others
            continue
        while True:  # recover, again if that is interrupted
            interruptions, now = interruptions + 1, failure
            failure = now + draw.expovariate(1 / mean)
            if failure >= now + saving.recovery:
                break
        now, cycle = now + saving.recovery, first
    return now, interruptions


def test_a_write_beside_training_costs_what_it_delays() -> None:
    """Where nothing fails, nothing; else the work of a write for each interruption; more where the next one waits."""
    beside = InterruptionCost(stall=5, recovery=300, write=600)
    assert forecast(float("inf"), work=DAY, saving=beside, interval=1000).stalls == pytest.approx(5 * 86.4)
    assert forecast(float("inf"), work=DAY, saving=beside, interval=500).stalls == pytest.approx(105 * 172.8)
    found = forecast(LLAMA3, work=DAY, saving=beside, interval=1000)
    plain = forecast(LLAMA3, work=DAY, saving=InterruptionCost(stall=5, recovery=300), interval=1000)
    assert found.recomputation == pytest.approx(plain.recomputation + 600, rel=0.1)
    lost = found.interruptions * (found.recovery + found.recomputation) + found.stalls
    assert found.effective == pytest.approx(1 - lost / found.seconds)
    assert (
        beside.best_interval(LLAMA3) == 600 < InterruptionCost(stall=30, recovery=300, write=600).best_interval(LLAMA3)
    )


def test_what_never_fails_needs_one_checkpoint() -> None:
    run = forecast(mean_between(0.0, 8), work=HOUR, saving=InterruptionCost(stall=36, recovery=300))
    assert (run.interruptions, run.chance, run.interval, run.effective) == (0, 0, HOUR, pytest.approx(1 / 1.01))


def test_a_run_that_gets_nowhere_takes_forever() -> None:
    """A checkpoint a month where something fails each hour."""
    run = forecast(HOUR, work=2 * MONTH, saving=InterruptionCost(stall=0, recovery=60), interval=MONTH)
    assert run.effective < 1e-6 and run.seconds > 1e6 * MONTH and run.chance == 1


def test_checkpoints_that_cost_nothing_are_taken_at_every_step() -> None:
    run = forecast(mean_between(1e-3, 8), work=DAY, saving=InterruptionCost(stall=0, recovery=0, step=2.5))
    assert run.interval == 2.5 and run.effective == pytest.approx(1, abs=1e-4)
