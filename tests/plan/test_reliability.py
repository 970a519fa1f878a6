"""Interruptions and checkpoints, against published figures and against drawn runs."""

from __future__ import annotations

import random
from math import exp, expm1, inf, log

import pytest

from stoker.plan.reliability import (
    DAY,
    HOUR,
    FailureRate,
    InterruptionCost,
    daly_interval,
    forecast,
    young_interval,
)

MONTH = 365.25 * DAY / 12
LLAMA3 = FailureRate(419 / (54 * 24 * 16384))  # Grattafiori et al., 2024, section 3.3.4
RSC1 = FailureRate(6.50e-3 / 24 / 8)  # Kokolis et al., 2024


@pytest.mark.parametrize(
    "availability, devices, chance", [(0.999, 1000, 0.632), (0.999, 8000, 0.9997), (0.9999, 8000, 0.551)]
)
def test_the_chance_of_an_interruption_in_a_month(availability: float, devices: int, chance: float) -> None:
    rate = FailureRate(-log(availability) / (MONTH / HOUR))
    assert rate.chance(devices=devices, seconds=MONTH) == pytest.approx(chance, abs=5e-4)
    assert rate.chance(devices=devices, seconds=MONTH) == pytest.approx(1 - availability**devices)


def test_llama3() -> None:
    assert LLAMA3.per_device_hour == pytest.approx(1.97e-5, rel=2e-3)
    assert LLAMA3.mean_between(16384) / HOUR == pytest.approx(3.09, abs=5e-3)
    assert LLAMA3.expected(devices=16384, seconds=54 * DAY) == pytest.approx(419)


def test_rsc1() -> None:
    """1.8 hours at 16,384 devices, 0.23 at 131,072."""
    assert RSC1.mean_between(16384) / HOUR == pytest.approx(1.80, abs=5e-3)
    assert RSC1.mean_between(131072) / HOUR == pytest.approx(0.23, abs=6e-3)


def test_checkpoints_of_a_minute_on_16384_devices() -> None:
    """Every 1,155 s, 10.4 % lost, and 2.7 % more for recoveries of five minutes; stalls of 5 s: 3.0 %."""
    mean = LLAMA3.mean_between(16384)
    interval = young_interval(60, mean)
    assert interval == pytest.approx(1155, abs=1)
    work = 54 * DAY
    without = forecast(
        LLAMA3, devices=16384, work=work, saving=InterruptionCost(stall=60, recovery=0), interval=interval
    )
    with_recovery = forecast(
        LLAMA3, devices=16384, work=work, saving=InterruptionCost(stall=60, recovery=300), interval=interval
    )
    assert 60 / interval + interval / (2 * mean) == pytest.approx(0.104, abs=5e-4)
    assert 1 - without.effective == pytest.approx(0.104, abs=5e-3)  # the first order counts the stalls of all time
    assert without.effective - with_recovery.effective == pytest.approx(0.027 * without.effective, abs=5e-4)
    short = forecast(LLAMA3, devices=16384, work=work, saving=InterruptionCost(stall=5, recovery=0))
    assert 1 - short.effective == pytest.approx(0.030, abs=5e-4)


def test_llama3_trained_more_than_nine_tenths_of_its_time() -> None:
    """With checkpoints written beside training and recoveries of a few minutes, as the paper says."""
    run = forecast(
        LLAMA3, devices=16384, work=54 * DAY, saving=InterruptionCost(stall=5, write=60, recovery=300, step=10)
    )
    assert 0.90 < run.effective < 0.95


def test_dalys_interval_is_better_than_youngs_where_checkpoints_are_dear() -> None:
    rate = FailureRate(1.0)
    for stall in (10, 300, 1200):
        saving = InterruptionCost(stall=stall, recovery=60)
        daly, young = (
            forecast(rate, devices=1, work=DAY, saving=saving, interval=interval(stall, HOUR)).effective
            for interval in (daly_interval, young_interval)
        )
        tried = (forecast(rate, devices=1, work=DAY, saving=saving, interval=i).effective for i in range(10, 7200, 5))
        assert young <= daly
        assert daly == pytest.approx(max(tried), rel=1e-3)
    assert daly_interval(3 * HOUR, HOUR) == HOUR


def test_the_parts_add_up_to_the_effective_time() -> None:
    run = forecast(RSC1, devices=16384, work=30 * DAY, saving=InterruptionCost(stall=30, write=120, recovery=400))
    lost = run.interruptions * (run.recovery + run.recomputation) + run.stalls
    assert run.effective == pytest.approx(1 - lost / run.seconds)
    assert run.seconds == pytest.approx(30 * DAY + lost)


def test_without_a_write_it_is_dalys_complete_model() -> None:
    mean, stall, recovery, interval = HOUR, 200.0, 900.0, 1000.0
    saving = InterruptionCost(stall=stall, recovery=recovery)
    run = forecast(FailureRate(1.0), devices=1, work=10 * DAY, saving=saving, interval=interval)
    complete = mean * exp(recovery / mean) * expm1((interval + stall) / mean) * 10 * DAY / interval
    assert run.seconds == pytest.approx(complete)


@pytest.mark.parametrize(
    "stall, write, recovery, interval", [(30, 0, 300, 600), (30, 240, 300, 600), (5, 400, 60, 900)]
)
def test_drawn_runs_take_as_long(stall: float, write: float, recovery: float, interval: float) -> None:
    saving = InterruptionCost(stall=stall, write=write, recovery=recovery)
    run = forecast(FailureRate(0.5), devices=1, work=2000 * HOUR, saving=saving, interval=interval)
    seconds, interruptions = drawn(saving, mean=2 * HOUR, work=2000 * HOUR, interval=interval)
    assert run.seconds == pytest.approx(seconds, rel=0.01)
    assert run.interruptions == pytest.approx(interruptions, rel=0.05)


def drawn(saving: InterruptionCost, *, mean: float, work: float, interval: float) -> tuple[float, int]:
    """(seconds, interruptions) of a run through exponential times between interruptions."""
    draw = random.Random(1)
    now, interruptions, done = 0.0, 0, 0.0
    kept, being_written = 0.0, (inf, 0.0)  # work to resume from; (when it will be written, work) of the newest
    failure = draw.expovariate(1 / mean)
    while done < work:
        end = now + interval + saving.stall
        if failure >= end:
            if being_written[0] <= end:
                kept = being_written[1]
            now, done = end, done + interval
            being_written = (now + saving.write, done)
            continue
        if being_written[0] <= failure:
            kept = being_written[1]
        done, being_written = kept, (inf, 0.0)
        while True:  # recover, again if that is interrupted
            interruptions, now = interruptions + 1, failure
            failure = now + draw.expovariate(1 / mean)
            if failure >= now + saving.recovery:
                break
        now += saving.recovery
    return now, interruptions


def test_what_never_fails_needs_one_checkpoint() -> None:
    run = forecast(FailureRate(0.0), devices=8, work=HOUR, saving=InterruptionCost(stall=36, recovery=300))
    assert (run.interruptions, run.chance, run.interval, run.effective) == (0, 0, HOUR, pytest.approx(1 / 1.01))


def test_the_interval_is_no_shorter_than_a_write_or_a_step() -> None:
    assert InterruptionCost(stall=0, write=90, recovery=0).best_interval(HOUR) == 90
    assert InterruptionCost(stall=0, write=90, recovery=0, step=200).best_interval(HOUR) == 200


def test_a_run_that_gets_nowhere_takes_forever() -> None:
    """A checkpoint a month where something fails each hour."""
    run = forecast(
        FailureRate(1.0), devices=1, work=2 * MONTH, saving=InterruptionCost(stall=0, recovery=60), interval=MONTH
    )
    assert run.effective < 1e-6 and run.seconds > 1e6 * MONTH and run.chance == 1


def test_checkpoints_that_cost_nothing_are_taken_at_every_step() -> None:
    run = forecast(FailureRate(1e-3), devices=8, work=DAY, saving=InterruptionCost(stall=0, recovery=0, step=2.5))
    assert run.interval == 2.5 and run.effective == pytest.approx(1, abs=1e-4)
