"""Mixtures against their definitions: counts, weights, temperature, and no row twice before all came once."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.data.mix import (
    Mixture,
    pattern_counts,
    proportional,
    shuffled_epochs,
    temperature_shares,
    weighted,
)

SIZES = st.lists(st.integers(min_value=1, max_value=300), min_size=1, max_size=5)


@dataclass(frozen=True)
class Rows:
    rows: int

    def nth_rows(self, draws: np.ndarray, key: int) -> np.ndarray:
        return shuffled_epochs(draws, self.rows, key)


def drawn(mixture: Mixture, first: int, last: int) -> list[tuple[int, int]]:
    sources, rows = mixture.draws(np.arange(first, last))
    return list(zip(sources.tolist(), rows.tolist(), strict=True))


def all_rows(sizes: list[int]) -> list[tuple[int, int]]:
    return [(s, row) for s, size in enumerate(sizes) for row in range(size)]


@settings(deadline=None, max_examples=40)
@given(sizes=SIZES, seed=st.integers(min_value=0, max_value=1000))
def test_unweighted_takes_every_row_once_an_epoch(sizes: list[int], seed: int) -> None:
    mixture = proportional([Rows(size) for size in sizes], seed)
    assert mixture.epoch == sum(sizes)
    for epoch in range(3):
        assert sorted(drawn(mixture, epoch * sum(sizes), (epoch + 1) * sum(sizes))) == all_rows(sizes)


def test_epochs_and_seeds_differ() -> None:
    one, other = (proportional([Rows(50), Rows(50)], seed) for seed in (1, 2))
    assert len({tuple(drawn(one, 0, 100)), tuple(drawn(one, 100, 200)), tuple(drawn(other, 0, 100))}) == 3


@settings(deadline=None, max_examples=40)
@given(
    sizes=SIZES,
    seed=st.integers(min_value=0, max_value=99),
    length=st.integers(min_value=1, max_value=700),
    data=st.data(),
)
def test_no_row_comes_again_before_all_of_its_source_came(
    sizes: list[int], seed: int, length: int, data: st.DataObject
) -> None:
    shares = data.draw(st.lists(st.floats(0.01, 100), min_size=len(sizes), max_size=len(sizes)))
    mixture = weighted([Rows(size) for size in sizes], shares, seed, length)
    came: list[Counter[int]] = [Counter() for _ in sizes]
    for source, row in drawn(mixture, 0, 3 * mixture.pattern):
        came[source][row] += 1
        least = min(came[source].values()) if len(came[source]) == sizes[source] else 0
        assert came[source][row] <= least + 1


def test_a_draw_alone_is_the_draw_among_others() -> None:
    mixture = weighted([Rows(7), Rows(30), Rows(500)], [5, 3, 1], 11, 537)
    together = drawn(mixture, 0, 1500)
    assert [drawn(mixture, i, i + 1)[0] for i in range(0, 1500, 37)] == together[::37]
    again = weighted([Rows(7), Rows(30), Rows(500)], [5, 3, 1], 11, 537)
    assert drawn(again, 900, 1500) == together[900:]


def test_weights_are_met_in_every_epoch() -> None:
    mixture = weighted([Rows(10), Rows(10), Rows(80)], [0.5, 0.3, 0.2], 0, 100)
    for epoch in range(4):
        counts = Counter(source for source, _ in drawn(mixture, 100 * epoch, 100 * (epoch + 1)))
        assert counts == {0: 50, 1: 30, 2: 20}


def test_an_epoch_draws_from_every_source_with_a_share() -> None:
    mixture = weighted([Rows(1), Rows(1), Rows(1)], [1, 1, 1], 0, 2)
    assert mixture.counts == (1, 1, 1) and mixture.epoch == 3


def test_weights_of_a_large_corpus_are_met_to_one_in_a_thousand() -> None:
    mixture = weighted([Rows(300_000), Rows(1000)], [0.9, 0.1], 0, 301_000)
    assert mixture.epoch == 301_000
    sources, _ = mixture.draws(np.arange(mixture.epoch))
    assert np.bincount(sources) / mixture.epoch == pytest.approx([0.9, 0.1], abs=1e-3)


@given(shares=st.lists(st.floats(0, 1000), min_size=1, max_size=8).filter(any), length=st.integers(1, 10_000))
def test_counts_are_the_shares_rounded(shares: list[float], length: int) -> None:
    counts = pattern_counts(shares, length)
    given_share = [share > 0 for share in shares]
    assert [count > 0 for count in counts] == given_share
    assert sum(counts) == max(length, sum(given_share))
    rare = sum(length * share / sum(shares) < 1 for share in shares)
    for count, share in zip(counts, shares, strict=True):
        assert abs(count - length * share / sum(shares)) <= 1 + rare


@given(
    sizes=st.lists(st.integers(1, 10**9), min_size=1, max_size=6),
    temperature=st.floats(min_value=0.5, max_value=20),
)
def test_temperature_against_the_formula(sizes: list[int], temperature: float) -> None:
    """p_i = (n_i / N)^(1/T) / sum_j (n_j / N)^(1/T)."""
    shares = np.array(temperature_shares(sizes, temperature))
    powers = (np.array(sizes) / sum(sizes)) ** (1 / temperature)
    assert shares / shares.sum() == pytest.approx(powers / powers.sum())


def test_a_temperature_of_one_is_proportional_and_a_large_one_is_flat() -> None:
    assert pattern_counts(temperature_shares([100, 900], 1), 1000) == (100, 900)
    assert pattern_counts(temperature_shares([100, 900], 1e9), 1000) == (500, 500)


def test_every_epoch_source_pattern_and_seed_has_an_order_of_its_own() -> None:
    epochs = shuffled_epochs(np.arange(400), 100, 5).reshape(4, 100)
    assert len(set(map(tuple, epochs.tolist()))) == 4 and (np.sort(epochs) == np.arange(100)).all()
    one, other = (weighted([Rows(50), Rows(50)], [1, 1], seed, 100) for seed in (1, 2))
    rows = [[row for source, row in drawn(one, 0, 100) if source == s] for s in (0, 1)]
    assert sorted(rows[0]) == sorted(rows[1]) == list(range(50)) and rows[0] != rows[1]
    patterns = [one.draws(np.arange(100 * n, 100 * n + 100))[0].tolist() for n in (0, 1)]
    assert patterns[0] != patterns[1] and patterns[0] != other.draws(np.arange(100))[0].tolist()


def test_rare_sources_take_their_draws_from_the_most_over_represented_one() -> None:
    assert pattern_counts([5.5, 4.4, 0.05, 0.05], 10) == (5, 3, 1, 1)
