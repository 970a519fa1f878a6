"""Who counts as hung, when, and who is named; who counts as slow."""

from __future__ import annotations

import pytest

from stoker.resilience.watchdog import WINDOW, Pulse, Stragglers, hang_timeout, hung

PULSE = Pulse(beat=1000.0, phase="train", step=8, done=7, steps=7, own=7.0, slowest=2.0, evaluate=0.0, save=0.0)


def late(phase: str = "train", **values: float) -> Pulse:
    return PULSE._replace(phase=phase, **values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("pulse", "hang", "longest", "seconds"),
    [
        (late(), "auto", {}, 120.0),
        (late(slowest=30.0), "auto", {}, 300.0),
        (late(steps=0), "auto", {}, 600.0),
        (late("start", steps=0), "auto", {}, 600.0),
        (late("evaluate"), "auto", {}, 1800.0),
        (late("evaluate"), "auto", {"evaluate": 40.0}, 1800.0),
        (late("evaluate"), "auto", {"evaluate": 400.0}, 4000.0),
        (late("save"), "auto", {"save": 1.0}, 600.0),
        (late("rollouts"), "auto", {"rollouts": 0.1}, 1800.0),
        (late(), 5.0, {}, 5.0),
        (late(slowest=30.0), 5.0, {}, 5.0),
        (late(steps=0), 5.0, {}, 600.0),
        (late("save"), 5.0, {"save": 1.0}, 600.0),
        (late("save"), 900.0, {"save": 1.0}, 900.0),
    ],
)
def test_how_long_a_silence_may_be(pulse: Pulse, hang: float, longest: dict[str, float], seconds: float) -> None:
    assert hang_timeout(pulse, hang, longest) == seconds  # type: ignore[arg-type]
    assert not hung({0: pulse}, now=1000.0 + seconds, hang=hang, longest=longest)
    (found,) = hung({0: pulse}, now=1000.1 + seconds, hang=hang, longest=longest)
    assert found.silent == pytest.approx(seconds + 0.1)


def test_the_one_that_is_behind_is_named_first() -> None:
    waits = late("optimizer")
    assert [h.rank for h in hung({0: waits, 1: late(), 2: waits}, now=2000.0, hang=5.0, longest={})] == [1, 0, 2]
    behind = late("save", step=6, done=6, beat=1001.0)
    found = hung({0: late(), 1: behind, 2: late(beat=1999.0)}, now=2000.0, hang=5.0, longest={"save": 0.1})
    assert [(h.rank, h.phase, h.step) for h in found] == [(1, "save", 6), (0, "train", 8)]
    first = hung({0: late(beat=1000.2), 1: late(beat=1000.1)}, now=2000.0, hang=5.0, longest={})
    assert [h.rank for h in first] == [1, 0]
    assert not hung({0: late("end")}, now=1e9, hang=5.0, longest={})


def after(steps: int, own: float) -> Pulse:
    return PULSE._replace(steps=1 + steps, done=1 + steps, own=own * steps)


def looked(own: dict[int, float], parts: list[list[int]], slow: float = 1.5, steps: int = WINDOW) -> list[int]:
    stragglers = Stragglers(parts, slow)
    assert not stragglers.look({rank: after(0, seconds) for rank, seconds in own.items()})
    assert not stragglers.look({rank: after(steps - 1, seconds) for rank, seconds in own.items()})
    return [found.rank for found in stragglers.look({rank: after(steps, seconds) for rank, seconds in own.items()})]


def test_a_rank_is_slow_against_those_with_the_same_part() -> None:
    assert looked({0: 1.0, 1: 1.6}, [[0, 1]]) == [1]
    assert looked({0: 1.0, 1: 1.4}, [[0, 1]]) == []
    assert looked({0: 1.0, 1: 1.0, 2: 1.0, 3: 1.6}, [[0, 1, 2, 3]]) == [3]
    assert looked({0: 1.0, 1: 1.0, 2: 2.0, 3: 2.1}, [[0, 1], [2, 3]]) == []  # stages of a pipeline differ
    assert looked({0: 1.0, 1: 2.1}, [[0], [1]]) == []
    assert looked({0: 0.001, 1: 0.004}, [[0, 1]]) == []  # milliseconds are of no account


def test_a_straggler_is_reported_once_a_window() -> None:
    stragglers = Stragglers([[0, 1]], 1.5)
    reported = []
    for steps in range(3 * WINDOW + 1):
        reported += stragglers.look({0: after(steps, 1.0), 1: after(steps, 2.0)})
    assert [(found.rank, found.first, found.last) for found in reported] == [
        (1, 2 + n * WINDOW, 1 + (n + 1) * WINDOW) for n in range(3)
    ]
    assert reported[0].own == pytest.approx(2.0) and reported[0].median == pytest.approx(1.0)
