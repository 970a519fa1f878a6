"""Several sources as one stream of draws, by size, weight or temperature.

The stream repeats a pattern. A pattern has ``counts[s]`` draws of source s, shuffled by (seed, pattern number).
The j-th draw of a source is the j-th row of its own shuffled epochs: a source is never repeated before all of
its rows were drawn, whatever its weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from stoker.data.order import permute, stream_key


class RowSource(Protocol):
    """What a mixture draws from: rows of a token cache, whole or still growing."""

    @property
    def rows(self) -> int:
        """How many rows there are in one epoch; of a growing source, waits until that is known."""

    def nth_rows(self, draws: np.ndarray, key: int) -> np.ndarray:
        """The rows that these draws take, draws counted over all epochs."""


def shuffled_epochs(draws: np.ndarray, size: int, key: int) -> np.ndarray:
    """Draw j of a source of ``size`` rows: row j mod size of the shuffle of epoch j // size."""
    epochs, indices = np.divmod(draws, size)
    rows = np.empty(len(draws), dtype=np.int64)
    for epoch in np.unique(epochs):
        here = epochs == epoch
        rows[here] = permute(indices[here], size, stream_key(key, int(epoch)))
    return rows


def pattern_counts(shares: Sequence[float], length: int) -> tuple[int, ...]:
    """``length`` draws split by shares: the largest-remainder method, every source with a share at least once."""
    total = float(sum(shares))
    exact = [length * share / total for share in shares]
    counts = [max(1, int(x)) if share > 0 else 0 for x, share in zip(exact, shares, strict=True)]
    by_remainder = sorted(range(len(shares)), key=lambda s: counts[s] - exact[s])
    for s in by_remainder:
        if sum(counts) >= length:
            break
        counts[s] += 1
    return tuple(counts)


def temperature_shares(sizes: Sequence[int], temperature: float) -> tuple[float, ...]:
    """Shares proportional to size^(1/temperature) (mT5, Xue et al. 2021, section 3.1, with alpha = 1/temperature)."""
    return tuple(float(size) ** (1.0 / temperature) for size in sizes)


@dataclass(frozen=True)
class Mixture:
    """The stream of draws.

    Attributes:
        sources: what is drawn from.
        counts: draws of each source in one pattern.
        seed: the job's seed.
    """

    sources: tuple[RowSource, ...]
    counts: tuple[int, ...]
    seed: int

    @property
    def pattern(self) -> int:
        """Draws in one pattern: an epoch, where sources are not streamed."""
        return sum(self.counts)

    def draws(self, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(sources, rows) of these draws of the run, each of the shape of ``slots``."""
        numbers, positions = np.divmod(np.asarray(slots, dtype=np.int64), self.pattern)
        starts = np.cumsum((0, *self.counts))
        shuffled = np.empty(len(numbers), dtype=np.int64)
        for number in np.unique(numbers):
            here = numbers == number
            shuffled[here] = permute(positions[here], self.pattern, stream_key(self.seed, 1, int(number)))
        sources = np.searchsorted(starts, shuffled, side="right") - 1
        rows = np.empty(len(numbers), dtype=np.int64)
        for s, source in enumerate(self.sources):
            here = sources == s
            if here.any():
                nth = numbers[here] * self.counts[s] + shuffled[here] - starts[s]
                rows[here] = source.nth_rows(nth, stream_key(self.seed, 2, s))
        return sources, rows


def proportional(sources: Sequence[RowSource], seed: int) -> Mixture:
    """Every row of every source exactly once an epoch."""
    return Mixture(tuple(sources), tuple(source.rows for source in sources), seed)


def weighted(sources: Sequence[RowSource], shares: Sequence[float], seed: int, length: int) -> Mixture:
    """Sources drawn by shares; an epoch is ``length`` draws."""
    return Mixture(tuple(sources), pattern_counts(shares, length), seed)
