"""Intervals against Student's and scipy's, and their coverage."""

from __future__ import annotations

import math

import numpy as np
import pytest

from stoker.evaluate.intervals import Mean, expanded_tail, mean_interval, mean_of, paired_difference, student_quantile

stats = pytest.importorskip("scipy.stats")


def test_the_mean_and_its_standard_error() -> None:
    values = [0.0, 1.0, 1.0, 0.0, 1.0]
    found = mean_of(values)
    assert found is not None and found.count == 5
    assert found.value == pytest.approx(0.6)
    assert found.standard_error == pytest.approx(stats.sem(values))
    assert mean_of([]) is None
    assert mean_of([1.0]).standard_error is None  # type: ignore[union-attr]


@pytest.mark.parametrize(("right", "rows"), [(1, 80), (0, 20), (20, 20), (7, 30)])
def test_the_interval_of_a_share_is_wilsons(right: int, rows: int) -> None:
    mean = mean_of([1.0] * right + [0.0] * (rows - right))
    theirs = stats.binomtest(right, rows).proportion_ci(method="wilson")
    assert mean is not None and mean_interval(mean) == pytest.approx((theirs.low, theirs.high), abs=1e-12)


@pytest.mark.parametrize("values", [[0.5, 0.25, 1.0, -2.0, 0.75], [0.6, 0.4, 0.5, 0.7] * 5])
def test_the_interval_of_other_means_is_normal(values: list[float]) -> None:
    mean = mean_of(values)
    assert mean is not None
    assert mean_interval(mean) == pytest.approx(stats.norm.interval(0.95, mean.value, mean.standard_error))
    assert mean_interval(Mean(0.5, None, 1)) == (None, None)


@pytest.mark.parametrize("rows", [12, 60])
@pytest.mark.parametrize("shares", [(0.0, 0.0), (0.02, 0.02), (0.4, 0.2), (0.95, 0.0)])
def test_the_interval_of_wins_covers_the_true_share(rows: int, shares: tuple[float, float]) -> None:
    """Also where nearly all rows are ties, of which the normal interval often has no length."""
    generator, true, covered = np.random.default_rng(0), 0.5 + (shares[0] - shares[1]) / 2, 0
    for wins, losses, ties in generator.multinomial(rows, [*shares, 1 - sum(shares)], 400):
        mean = mean_of([1.0] * wins + [0.0] * losses + [0.5] * ties)
        assert mean is not None
        low, high = mean_interval(mean)
        assert low is not None and high is not None and 0 <= low < high <= 1
        covered += low <= true <= high
    assert covered >= 0.93 * 400


def test_equal_scores_in_every_row_leave_a_difference_open() -> None:
    ties = paired_difference([0.5] * 40, [0.5] * 40, seed=0)
    assert ties.value == 0 and ties.low == pytest.approx(-0.066, abs=1e-3) and ties.high == -ties.low
    wins = paired_difference([1.0] * 40, [0.0] * 40, seed=0)
    assert wins.excludes_zero and 0.8 < wins.low < wins.value == wins.high == 1
    losses = paired_difference([0.25] * 40, [0.25] * 40, seed=0, units=[2.0] * 40)  # of tokens, not of a score
    assert losses.low == losses.high == 0


@pytest.mark.parametrize("degrees", [4, 9, 30, 1000])
@pytest.mark.parametrize("probability", [0.9, 0.975, 0.995])
def test_quantiles_are_students(degrees: int, probability: float) -> None:
    assert student_quantile(probability, degrees) == pytest.approx(stats.t.ppf(probability, degrees), rel=0.01)


def test_the_tail_is_students_quantile_in_the_spread_of_resamples() -> None:
    expected = stats.norm.cdf(-math.sqrt(12 / 11) * stats.t.ppf(0.975, 11))
    assert expanded_tail(0.025, 12) == pytest.approx(expected, rel=0.01)


def test_the_interval_is_scipys_at_the_same_tails() -> None:
    generator = np.random.default_rng(1)
    a, b = generator.normal(size=40), generator.normal(0.3, size=40)
    found = paired_difference(a, b, seed=0)
    confidence = 1 - 2 * expanded_tail(0.025, 40)
    theirs = stats.bootstrap(
        (a - b,), np.mean, n_resamples=10_000, confidence_level=confidence, method="percentile", rng=generator
    ).confidence_interval
    width = theirs.high - theirs.low
    assert found.value == pytest.approx(float(np.mean(a - b)))
    assert abs(found.low - theirs.low) < 0.04 * width and abs(found.high - theirs.high) < 0.04 * width


def test_the_interval_of_normal_differences_is_students() -> None:
    differences = np.random.default_rng(2).normal(size=60)
    found = paired_difference(differences, np.zeros(60), seed=0)
    expected = stats.t.interval(0.95, 59, differences.mean(), stats.sem(differences))
    width = expected[1] - expected[0]
    assert abs(found.low - expected[0]) < 0.07 * width and abs(found.high - expected[1]) < 0.07 * width


@pytest.mark.parametrize("rows", [12, 40])
def test_the_interval_holds_the_true_difference_as_often_as_it_says(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker.evaluate.intervals.RESAMPLES", 1000)
    generator, held, times = np.random.default_rng(3), 0, 400
    for trial in range(times):
        common = generator.normal(size=rows)  # rows differ in how hard they are: pairing takes that out
        a, b = common + generator.normal(0.5, 1, rows), common + generator.normal(0, 1, rows)
        found = paired_difference(a, b, seed=trial)
        held += found.low <= 0.5 <= found.high
    assert abs(held / times - 0.95) < 4 * math.sqrt(0.95 * 0.05 / times)


def test_wins_losses_and_ties() -> None:
    found = paired_difference([1, 1, 0, 0.5], [0, 1, 1, 0], seed=0)
    assert (found.wins, found.losses, found.ties) == (2, 1, 1)
    assert not found.excludes_zero


def test_pairing_finds_a_small_difference_between_hard_and_easy_rows() -> None:
    easy = np.repeat([0.0, 1.0], 20)
    found = paired_difference(easy + 0.01, easy, seed=0)
    assert found.excludes_zero and found.value == pytest.approx(0.01)


def test_the_same_seed_gives_the_same_interval() -> None:
    a, b = np.random.default_rng(4).normal(size=(2, 30))
    assert paired_difference(a, b, seed=5) == paired_difference(a, b, seed=5)
    assert paired_difference(a, b, seed=5) != paired_difference(a, b, seed=6)


def test_sums_over_units_weigh_rows_by_their_units() -> None:
    found = paired_difference([10.0, 1.0], [4.0, 1.0], seed=0, units=[4, 1])
    assert found.value == pytest.approx(11 / 5 - 1)


@pytest.mark.parametrize(("rows", "holds"), [(1, False), (2, False), (9, False), (10, True)])
def test_a_few_rows_are_no_significant_difference(rows: int, holds: bool) -> None:
    assert paired_difference([1.0] * rows, [0.5] * rows, seed=0).excludes_zero == holds
