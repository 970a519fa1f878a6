"""How often copies in memory are made."""

from __future__ import annotations

import pytest

from stoker.checkpoint.copy_interval import CopyInterval


def test_copies_take_a_fiftieth_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of 0.29 s beside steps of 1 s: every 15 steps."""
    now = 0.0
    monkeypatch.setattr("time.perf_counter", lambda: now)
    cadence = CopyInterval(None)
    copied = []
    for step in range(1, 61):
        cadence.begin_step()
        now += 1.0
        if cadence.due(step):
            copied.append(step)
            cadence.made(step, [(0.29 if len(copied) > 1 else None, cadence.step_seconds)])
            now += 0.29  # no part of a step
    assert copied == [1, 2, 17, 32, 47]


@pytest.mark.parametrize(("asked", "steps"), [(0, []), (4, [4, 8]), (1, list(range(1, 9)))])
def test_copies_are_made_as_often_as_asked(asked: int, steps: list[int]) -> None:
    cadence = CopyInterval(asked)
    assert [step for step in range(1, 9) if cadence.due(step)] == steps


def test_what_costs_nothing_is_done_every_step() -> None:
    cadence = CopyInterval(None)
    cadence.made(1, [(1e-5, 1.0), (2e-5, 1.0)])
    assert cadence.every == 1
    assert cadence.made(2, [(0.05, 1.0), (0.1, 0.5)]) and cadence.every == 5  # the slowest process of each counts


def test_a_step_that_took_long_once_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("time.perf_counter", lambda: now)
    cadence = CopyInterval(None)
    for seconds in (1.0, 1.0, 60.0, 1.0, 2.0):  # one step compiled, or evaluated
        cadence.begin_step()
        now += seconds
        cadence.due(1)
    assert cadence.step_seconds == 1.0


def test_the_interval_follows_large_changes_only() -> None:
    cadence = CopyInterval(None)
    intervals = []
    for step, seconds in enumerate((0.2, 0.16, 0.1, 0.08, 0.09, 0.0), start=1):
        cadence.made(step, [(seconds, 1.0)])
        intervals.append(cadence.every)
    assert intervals == [10, 10, 10, 4, 5, 1]
    assert not cadence.made(7, [(0.5, 1.0), (None, 1.0)]) and cadence.every == 1  # not all processes know their costs
