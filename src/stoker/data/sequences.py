"""The sequences of a run: the n-th is the same whatever the batch size, the number of processes or the restarts.

A sequence is one row, or with packing several rows that fill it. The only data state of a run is how many
sequences it has consumed.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import floor

import numpy as np

from stoker.data.cache import Row, TokenCache
from stoker.data.mix import Mixture, shuffled_epochs
from stoker.data.order import permute, stream_key
from stoker.data.pack import WINDOW, pack_window


@dataclass(frozen=True)
class Document:
    """A row in its place: what a micro-batch is made of.

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
    """The rows of a cache that are trained on: all but the held-out ones."""

    cache: TokenCache
    chosen: np.ndarray  # row numbers of the cache

    @property
    def rows(self) -> int:
        return len(self.chosen)

    def nth_rows(self, draws: np.ndarray, key: int) -> np.ndarray:
        return self.chosen[shuffled_epochs(draws, self.rows, key)]


@dataclass(frozen=True)
class Stream:
    """A source that may still be growing: read shard by shard, each shard shuffled in itself."""

    cache: TokenCache

    @property
    def rows(self) -> int:
        return self.cache.rows

    def nth_rows(self, draws: np.ndarray, key: int) -> np.ndarray:
        return np.array([self._nth_row(int(draw), key) for draw in draws], dtype=np.int64)

    def _nth_row(self, draw: int, key: int) -> int:
        epoch, index = 0, draw
        if not self.cache.wait_for(index):
            epoch, index = divmod(draw, self.cache.rows)
        starts = self.cache.starts
        shard = bisect_right(starts, index) - 1
        size = starts[shard + 1] - starts[shard]
        return starts[shard] + int(permute(index - starts[shard], size, stream_key(key, epoch, shard))[0])


class Sequences:
    """The run's sequences in order.

    Args:
        caches: one of each source.
        mixture: which row of which source is drawn when.
        capacity: tokens of a packed sequence; None where a sequence is one row.
        endless: whether the mixture has no epochs (streams).
    """

    def __init__(
        self, caches: Sequence[TokenCache], mixture: Mixture, capacity: int | None, *, endless: bool = False
    ) -> None:
        self.caches = tuple(caches)
        self.mixture = mixture
        self.capacity = capacity
        self.epoch_rows = None if endless else mixture.pattern
        self._windows: list[list[list[int]]] = []  # of each window, the slots of each sequence
        self._ends: list[int] = []  # sequences up to the end of each window
        self._slots = 0  # draws that the windows have used up

    def total(self, epochs: float) -> int:
        """Sequences in so many epochs (a part of an epoch counts its draws)."""
        assert self.epoch_rows is not None, "a stream has no epochs"
        draws = floor(self.epoch_rows * epochs + 1e-9)
        if self.capacity is None:
            return draws
        while self._slots < draws:
            self._next_window()
        drawn = list(accumulate(sum(map(len, window)) for window in self._windows))
        return self._ends[bisect_left(drawn, draws)] if draws else 0

    def draws_of(self, sequences: int) -> int:
        """Rows drawn for the first so many sequences (of a packed window, all of its rows)."""
        if self.capacity is None:
            return sequences
        while not self._ends or self._ends[-1] < sequences:
            self._next_window()
        return sum(len(slots) for window in self._windows[: bisect_left(self._ends, sequences) + 1] for slots in window)

    def __getitem__(self, index: int) -> list[Document]:
        if self.capacity is None:
            return self._documents([index])
        while not self._ends or self._ends[-1] <= index:
            self._next_window()
        window = bisect_right(self._ends, index)
        before = self._ends[window - 1] if window else 0
        return self._documents(self._windows[window][index - before])

    def _documents(self, slots: Sequence[int]) -> list[Document]:
        sources, rows = self.mixture.draws(np.asarray(slots))
        return [Document(self.caches[s][r], int(s), int(r)) for s, r in zip(sources, rows, strict=True)]

    def _next_window(self) -> None:
        assert self.capacity is not None
        size = WINDOW
        if self.epoch_rows is not None:  # a window never reaches over the end of an epoch
            size = min(size, self.epoch_rows - self._slots % self.epoch_rows)
        sources, rows = self.mixture.draws(np.arange(self._slots, self._slots + size))
        lengths = [self.caches[s].length(int(r)) for s, r in zip(sources, rows, strict=True)]
        packed = pack_window(lengths, self.capacity, stream_key(self.mixture.seed, 3, len(self._windows)))
        self._windows.append([[self._slots + i for i in sequence] for sequence in packed])
        self._ends.append((self._ends[-1] if self._ends else 0) + len(packed))
        self._slots += size

    def origin(self, document: Document) -> tuple[str, int]:
        """(file, row number) of a document, for people."""
        return self.caches[document.source].origin(document.index)


def hold_out(digests: np.ndarray, fraction: float) -> np.ndarray:
    """A mask of the rows held out for evaluation: about ``fraction`` of them, at least one.

    Rows are chosen by their content, so equal rows fall on the same side and a held-out row is never trained on
    under another number.
    """
    if fraction <= 0 or len(digests) < 2:
        return np.zeros(len(digests), dtype=bool)
    scrambled = permute(digests % (1 << 32), 1 << 32, stream_key(0x5EED))
    order = np.lexsort((digests, scrambled))
    wanted = min(len(digests) - 1, max(1, round(fraction * len(digests))))
    mask = np.isin(digests, digests[order[:wanted]])  # with their duplicates
    return mask if not mask.all() else np.zeros(len(digests), dtype=bool)
