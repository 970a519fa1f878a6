"""Mixes several sources into one stream of draws, by size, weight or temperature.

The stream repeats a pattern. A pattern has ``counts[s]`` draws of source s, shuffled by (seed, pattern
number). The j-th draw of a source is the j-th row of its own shuffled epochs: no row is repeated before all
rows of its source were drawn, whatever the weights.

If a pattern takes every row once, the shuffle itself numbers the draws: a closed form, at any size. If it may
take a row twice, the draws must follow the order of the slots: such a pattern is short and is laid out as a table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Protocol

import numpy as np

from stoker.data.order import permute, stream_key

PATTERN = 1 << 16  # draws over which weights hold: a share is met to 1 in 65,536, and the table takes 1 MB


class RowSource(Protocol):
    """A source that a mixture draws from: the rows of a token cache, complete or still growing."""

    @property
    def rows(self) -> int:
        """Number of rows in one epoch; a growing source blocks until the number is known."""

    def nth_rows(self, draws: np.ndarray, key: int) -> np.ndarray:
        """Maps draws, counted over all epochs, to rows."""


def shuffled_epochs(draws: np.ndarray, size: int, *key: int) -> np.ndarray:
    """Returns the rows of draws: draw j of ``size`` rows is row j mod size of the shuffle of epoch j // size.

    Args:
        key: integers that determine the shuffles, with the epoch; see `stream_key`.
    """
    epochs, indices = np.divmod(draws, size)
    rows = np.empty(len(draws), dtype=np.int64)
    for epoch in np.unique(epochs):
        here = epochs == epoch
        rows[here] = permute(indices[here], size, stream_key(*key, int(epoch)))
    return rows


def pattern_counts(shares: Sequence[float], length: int) -> tuple[int, ...]:
    """Splits ``length`` draws by shares: largest remainders, and every source with a share at least once.

    They sum to ``length``, or to the number of sources with a share where that is more.
    """
    total = float(sum(shares))
    if total <= 0:
        return (0,) * len(shares)
    exact = [length * share / total for share in shares]
    counts = [max(1, int(x)) if share > 0 else 0 for x, share in zip(exact, shares, strict=True)]
    by_remainder = sorted(range(len(shares)), key=lambda s: counts[s] - exact[s])
    for s in by_remainder:
        if sum(counts) >= length:
            break
        counts[s] += 1 if shares[s] > 0 else 0
    while sum(counts) > length and max(counts) > 1:  # the most over-represented sources give up what rare ones gained
        most = max((s for s in range(len(counts)) if counts[s] > 1), key=lambda s: counts[s] - exact[s])
        counts[most] -= 1
    return tuple(counts)


def temperature_shares(sizes: Sequence[int], temperature: float) -> tuple[float, ...]:
    """Returns shares proportional to size^(1/temperature) (mT5, Xue et al. 2021, section 3.1: alpha is 1/T)."""
    most = max(sizes, default=0)  # relative to it, so that no power is larger than a float can be
    return tuple((size / most) ** (1.0 / temperature) if size else 0.0 for size in sizes)


@lru_cache(maxsize=8)
def _table(counts: tuple[int, ...], key: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns (source, which draw of it in this pattern) for each slot of a pattern."""
    size = sum(counts)
    sources = np.repeat(np.arange(len(counts)), counts)[permute(np.arange(size), size, key)]
    nth = np.empty(size, dtype=np.int64)
    for s, count in enumerate(counts):
        nth[sources == s] = np.arange(count)
    return sources, nth


@dataclass(frozen=True)
class Mixture:
    """The stream of draws.

    Attributes:
        sources: the sources that are drawn from.
        counts: draws of each source in one pattern.
        seed: the job's seed.
        epoch: draws in one epoch.
        repeats: whether one pattern may draw a row twice.
    """

    sources: tuple[RowSource, ...]
    counts: tuple[int, ...]
    seed: int
    epoch: int
    repeats: bool

    @cached_property
    def pattern(self) -> int:
        """Number of draws in one pattern."""
        return sum(self.counts)

    def draws(self, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns (sources, rows) of these draws of the run, each of the shape of ``slots``."""
        numbers, positions = np.divmod(np.asarray(slots, dtype=np.int64), self.pattern)
        sources, nth = np.empty_like(numbers), np.empty_like(numbers)
        for number in np.unique(numbers):
            here = numbers == number
            sources[here], nth[here] = self._in_pattern(int(number), positions[here])
        rows = np.empty_like(numbers)
        for s, source in enumerate(self.sources):
            here = sources == s
            if here.any():
                draws = numbers[here] * self.counts[s] + nth[here]
                rows[here] = source.nth_rows(draws, stream_key(self.seed, 2, s))
        return sources, rows

    def _in_pattern(self, number: int, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns (source, which draw of it in this pattern) for positions in a pattern."""
        key = stream_key(self.seed, 1, number)
        if self.repeats:
            sources, nth = _table(self.counts, key)
            return sources[positions], nth[positions]
        shuffled = permute(positions, self.pattern, key)
        starts = np.cumsum((0, *self.counts))
        sources = np.searchsorted(starts, shuffled, side="right") - 1
        return sources, shuffled - starts[sources]


def proportional(sources: Sequence[RowSource], seed: int) -> Mixture:
    """Returns a mixture that draws every row of every source exactly once an epoch."""
    counts = tuple(source.rows for source in sources)
    return Mixture(tuple(sources), counts, seed, sum(counts), repeats=False)


def weighted(sources: Sequence[RowSource], shares: Sequence[float], seed: int, length: int) -> Mixture:
    """Returns a mixture by shares; an epoch is ``length`` draws, and the shares are exact in each `PATTERN` of them."""
    counts = pattern_counts(shares, min(length, PATTERN))
    return Mixture(tuple(sources), counts, seed, max(length, sum(counts)), repeats=True)
