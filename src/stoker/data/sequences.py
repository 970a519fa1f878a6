"""The sequences of a run: the n-th is the same at any batch size, number of processes and restarts.

A sequence is one row, or with packing several rows that fill it. The only data state of a run is the number of
sequences that it has consumed.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import floor
from threading import Lock

import numpy as np

from stoker.data.mix import Mixture, shuffled_epochs
from stoker.data.order import permute, stream_key
from stoker.data.pack import WINDOW, pack_window
from stoker.data.token_cache import Row, TokenCache

BLOCK = 64  # draws looked up together where sequences are not packed
Draws = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Document:
    """A row with its origin; a micro-batch consists of these.

    Attributes:
        row: token ids and the mask of trained tokens.
        source: index of its source in the job.
        index: row of that source's cache, by which its origin is found.
    """

    row: Row
    source: int
    index: int


@dataclass(frozen=True)
class Selection:
    """The training rows of a cache, without the held-out ones; pairs of rows in tasks that train on pairs."""

    cache: TokenCache
    chosen: np.ndarray

    @property
    def rows(self) -> int:
        return len(self.chosen)

    def nth_rows(self, draws: np.ndarray, key: int) -> np.ndarray:
        return self.chosen[shuffled_epochs(draws, self.rows, key)]


@dataclass(frozen=True)
class GrowingSource:
    """A source that may still be growing: read shard by shard, each shard shuffled in itself."""

    cache: TokenCache

    @property
    def rows(self) -> int:
        return self.cache.rows

    def nth_rows(self, draws: np.ndarray, key: int) -> np.ndarray:
        epochs, indices = np.zeros_like(draws), draws
        if not self.cache.wait_for(int(draws.max(initial=0))):
            epochs, indices = np.divmod(draws, self.cache.rows)
        starts = np.asarray(self.cache.starts)
        shards = np.searchsorted(starts, indices, side="right") - 1
        rows = np.empty(len(draws), dtype=np.int64)
        for epoch, shard in set(zip(epochs.tolist(), shards.tolist(), strict=True)):
            here = (epochs == epoch) & (shards == shard)
            start, size = int(starts[shard]), int(starts[shard + 1] - starts[shard])
            rows[here] = start + permute(indices[here] - start, size, stream_key(key, epoch, shard))
        return rows


class Sequences:
    """The run's sequences in order.

    Args:
        caches: one of each source.
        mixture: the order in which rows are drawn from the sources.
        capacity: tokens of a packed sequence; None if a sequence is one row.
        endless: whether the mixture has no epochs (streams).
        unit_size: consecutive rows of the cache that are drawn as one.
    """

    def __init__(
        self,
        caches: Sequence[TokenCache],
        mixture: Mixture,
        capacity: int | None,
        *,
        endless: bool = False,
        unit_size: int = 1,
    ) -> None:
        self.caches = tuple(caches)
        self.unit_size = unit_size
        self.mixture = mixture
        self.capacity = capacity
        self.epoch_rows = None if endless else mixture.epoch
        self._ends: list[int] = []  # sequences up to the end of each window
        self._slots: list[int] = [0]  # draws up to the start of each window, and after the last
        # A window is a function of its number: only the last ones are cached.
        self._window = lru_cache(maxsize=4)(self._make_window)
        self._block = lru_cache(maxsize=4)(self._make_block)
        self._lock = Lock()  # batches are laid out in a separate thread

    def total(self, epochs: float) -> int:
        """Returns the number of sequences in a number of epochs.

        A part of an epoch counts its draws; packed, the first sequences of its last window that hold as many.
        """
        assert self.epoch_rows is not None, "a stream has no epochs"
        draws = floor(self.epoch_rows * epochs + 1e-9)
        if self.capacity is None or not draws:
            return draws
        with self._lock:
            while self._slots[-1] < draws:
                self._next_window()
            last = bisect_left(self._slots, draws) - 1
            _, packed = self._window(last)
            held = np.cumsum([len(places) for places in packed])
            before = self._ends[last - 1] if last else 0
            return before + int(np.searchsorted(held, draws - self._slots[last])) + 1

    def draws_per_sequence(self) -> float:
        """Returns the mean number of draws in a packed sequence, as the first window has it."""
        with self._lock:
            if not self._ends:
                self._next_window()
            return self._slots[1] / self._ends[0]

    def __getitem__(self, index: int) -> list[Document]:
        with self._lock:
            return self._sequence(index)

    def _sequence(self, index: int) -> list[Document]:
        if index < 0 or not self.mixture.pattern:
            raise IndexError(f"sequence {index}: there are none")
        if self.capacity is None:
            sources, rows = self._block(index // BLOCK)
            return self._documents((sources, rows), [index % BLOCK])
        while not self._ends or self._ends[-1] <= index:
            self._next_window()
        number = bisect_right(self._ends, index)
        before = self._ends[number - 1] if number else 0
        draws, packed = self._window(number)
        return self._documents(draws, packed[index - before])

    def _documents(self, draws: Draws, places: Sequence[int]) -> list[Document]:
        sources, rows = draws
        found = [(int(sources[i]), int(rows[i]) * self.unit_size + k) for i in places for k in range(self.unit_size)]
        return [Document(self.caches[s][r], s, r) for s, r in found]

    def _make_block(self, number: int) -> Draws:
        return self.mixture.draws(np.arange(number * BLOCK, (number + 1) * BLOCK))

    def _next_window(self) -> None:
        if not self.mixture.pattern:
            raise IndexError("there are no sequences")
        start, size = self._slots[-1], WINDOW
        if self.epoch_rows is not None:  # a window never spans the end of an epoch
            size = min(size, self.epoch_rows - start % self.epoch_rows)
        self._slots.append(start + size)
        _, packed = self._window(len(self._ends))
        self._ends.append((self._ends[-1] if self._ends else 0) + len(packed))

    def _make_window(self, number: int) -> tuple[Draws, list[list[int]]]:
        """Returns the draws of a window, and the places among them of each of its sequences."""
        assert self.capacity is not None
        sources, rows = self.mixture.draws(np.arange(self._slots[number], self._slots[number + 1]))
        lengths = np.empty(len(rows), dtype=np.int64)
        for s, cache in enumerate(self.caches):
            own = rows[sources == s] * self.unit_size
            lengths[sources == s] = sum(cache.lengths(own + k) for k in range(self.unit_size))
        packed = pack_window(lengths.tolist(), self.capacity, stream_key(self.mixture.seed, 3, number))
        return (sources, rows), packed

    def origin(self, document: Document) -> tuple[str, int]:
        """Returns (file, row number) of a document, for people."""
        return self.caches[document.source].origin(document.index)


def by_length(documents: Sequence[Document], unit_size: int = 1) -> list[Document]:
    """Sorts documents, the longest last; those that are drawn together stay together, in their order."""
    units = [documents[i : i + unit_size] for i in range(0, len(documents), unit_size)]
    return [d for unit in sorted(units, key=lambda unit: max(len(d.row.ids) for d in unit)) for d in unit]
