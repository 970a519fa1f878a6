"""Byte-pair encoding on top of an encoding: merges learnt from texts that are already symbols (Sennrich et al., 2016).

The most frequent pair of neighbours becomes a symbol everywhere, repeatedly. A pair's count only falls after the newer
of its symbols appeared, so a heap of earlier counts suffices: a pair is counted again when it reaches the top. Its
places are found from those of its rarer symbol.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

import numpy as np

LONGEST = 16  # characters of a learnt token, as in sentencepiece: longer ones are phrases of one source
FEWEST = 2  # occurrences of a pair: a pair that occurs once is not merged
BETWEEN, GONE, ADOPTED = -1, -2, -1


@dataclass(frozen=True)
class Symbol:
    """A unit of the texts before merges are learnt.

    Attributes:
        text: the token.
        characters: how many begin in it.
        inherited: bytes at its beginning that belong to a character which began before.
        missing: bytes that its last character still needs; ignored where none begins in it.
        unknown: whether it is a character without a token; learning one counts as a merge.
    """

    text: str
    characters: int = 1
    inherited: int = 0
    missing: int = 0
    unknown: bool = False


@dataclass(frozen=True)
class Merge:
    """A learnt token: two symbols by number, or the unknown character ``left`` alone. Numbered after symbols."""

    left: int
    right: int | None
    text: str


class _Places:
    """The positions of symbols: all runs in one linked list, from which a merge removes its right half."""

    def __init__(self, symbols: np.ndarray, weights: np.ndarray, known: int) -> None:
        size = len(symbols)
        self.symbols, self.weights = symbols, weights
        self.after = np.arange(1, size + 1, dtype=np.int64)
        self.before = np.arange(-1, size - 1, dtype=np.int64)
        order = np.argsort(symbols, kind="stable")
        bounds = np.searchsorted(symbols[order], np.arange(known + 1))
        self._of = [order[bounds[i] : bounds[i + 1]] for i in range(known)]

    def of(self, symbol: int) -> np.ndarray:
        """Returns the positions of a symbol, ascending."""
        found = self._of[symbol]
        standing = self.symbols[found] == symbol
        if not standing.all():
            found = self._of[symbol] = found[standing]
        return found

    def of_pair(self, left: int, right: int) -> np.ndarray:
        """Returns the positions of a pair's left halves, ascending; of overlapping pairs (``aaa``) the first."""
        lefts, rights = self.of(left), self.of(right)
        if len(lefts) <= len(rights):
            found = lefts[self.symbols[self.after[lefts]] == right]
        else:
            found = self.before[rights]
            found = found[self.symbols[found] == left]
        return self._apart(found) if left == right else found

    def _apart(self, found: np.ndarray) -> np.ndarray:
        """Drops every second of directly consecutive positions, whose pairs overlap."""
        if len(found) < 2:
            return found
        follows = np.concatenate(([False], self.after[found[:-1]] == found[1:]))
        starts = np.flatnonzero(~follows)
        within = np.arange(len(found)) - starts[np.searchsorted(starts, np.arange(len(found)), side="right") - 1]
        return found[within % 2 == 0]

    def put(self, at: np.ndarray, symbol: int, *, pair: bool) -> None:
        """Replaces the symbols (or pairs) at these positions by a new symbol."""
        if pair:
            rights = self.after[at]
            beyond = self.after[rights]
            self.symbols[rights] = GONE
            self.after[at] = beyond
            self.before[beyond] = at
        self.symbols[at] = symbol
        self._of.append(at)

    def neighbours(self, at: np.ndarray, symbol: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns (left, right, count) of every pair with a new symbol in it."""
        before, after = self.symbols[self.before[at]], self.symbols[self.after[at]]
        lefts, rights = before >= 0, (after >= 0) & (after != symbol)
        pairs = np.concatenate((_key(before[lefts], symbol), _key(np.full(rights.sum(), symbol), after[rights])))
        return _counted(pairs, np.concatenate((self.weights[at[lefts]], self.weights[at[rights]])))

    def pairs(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns (left, right, count) of every pair."""
        left, right = self.symbols[:-1], self.symbols[1:]
        both = (left >= 0) & (right >= 0)
        return _counted(_key(left[both], right[both]), self.weights[:-1][both])


def learn_merges(
    runs: Sequence[Sequence[int]],
    counts: Sequence[int],
    symbols: Sequence[Symbol],
    taken: set[str],
    size: int,
    *,
    inside: str = "",
) -> list[Merge]:
    """Learns up to ``size`` merges, each of the most frequent pair; ties go to the pair with the lower numbers.

    A pair becomes a token only where both halves are whole characters, or the second half completes or continues the
    first: a token never begins within a character. Pairs whose text is already a token are not merged.

    Args:
        runs: symbols by number; nothing is merged across the end of a run.
        counts: occurrences of each run.
        taken: texts that are already tokens.
        inside: the prefix of tokens inside a word, which a merge omits between its halves.
    """
    flat = np.full(1 + sum(len(run) + 1 for run in runs), BETWEEN, dtype=np.int64)
    weights = np.zeros(len(flat), dtype=np.int64)
    at = 1
    for run, count in zip(runs, counts, strict=True):
        flat[at : at + len(run)] = run
        weights[at : at + len(run)] = count
        at += len(run) + 1
    places = _Places(flat, weights, len(symbols))
    rules = _Rules(symbols, size, inside)
    taken = set(taken)
    heap = rules.candidates(*places.pairs())
    for number, symbol in enumerate(symbols):
        if symbol.unknown:
            heap.append((-int(weights[places.of(number)].sum()), number, ADOPTED))
    heapify(heap)
    learnt: list[Merge] = []
    while heap and len(learnt) < size:
        bound, left, right = heappop(heap)
        standing = places.of(left) if right == ADOPTED else places.of_pair(left, right)
        count = int(weights[standing].sum())
        if count < FEWEST:
            continue
        if count < -bound:
            heappush(heap, (-count, left, right))
            continue
        merge = Merge(left, None if right == ADOPTED else right, rules.text(left, right))
        if merge.text in taken:
            continue
        taken.add(merge.text)
        learnt.append(merge)
        new = rules.add(left, right)
        places.put(standing, new, pair=right != ADOPTED)
        for candidate in rules.candidates(*places.neighbours(standing, new)):
            heappush(heap, candidate)
    return learnt


class _Rules:
    """The rules that decide which pairs may become tokens."""

    def __init__(self, symbols: Sequence[Symbol], more: int, inside: str) -> None:
        room = len(symbols) + more
        self._inside = inside
        self._texts = [symbol.text for symbol in symbols]
        self._unknown, self._characters = np.zeros(room, dtype=bool), np.ones(room, dtype=np.int64)
        self._inherited, self._missing = np.zeros(room, dtype=np.int64), np.zeros(room, dtype=np.int64)
        for number, symbol in enumerate(symbols):
            self._unknown[number], self._characters[number] = symbol.unknown, symbol.characters
            self._inherited[number], self._missing[number] = symbol.inherited, symbol.missing

    def text(self, left: int, right: int) -> str:
        return self._texts[left] + ("" if right == ADOPTED else self._texts[right].removeprefix(self._inside))

    def add(self, left: int, right: int) -> int:
        """Returns the number of a new symbol."""
        number = len(self._texts)
        self._texts.append(self.text(left, right))
        if right != ADOPTED:
            self._characters[number] = self._characters[left] + self._characters[right]
            still = self._missing[left] - self._inherited[right]
            self._missing[number] = self._missing[right] if self._characters[right] else still
        return number

    def candidates(self, left: np.ndarray, right: np.ndarray, counts: np.ndarray) -> list[tuple[int, int, int]]:
        """Returns (minus the count, left, right) of the pairs that may become tokens."""
        missing, inherited = self._missing[left], self._inherited[right]
        whole = (missing == 0) & (inherited == 0) & (self._missing[right] == 0)
        completing = (missing > 0) & (inherited == missing)
        going_on = (missing > 0) & (inherited > 0) & (inherited < missing) & (self._characters[right] == 0)
        may = (counts >= FEWEST) & (self._inherited[left] == 0) & (whole | completing | going_on)
        may &= ~self._unknown[left] & ~self._unknown[right]
        may &= self._characters[left] + self._characters[right] <= LONGEST
        return list(zip((-counts[may]).tolist(), left[may].tolist(), right[may].tolist(), strict=True))


def _key(left: np.ndarray, right: np.ndarray | int) -> np.ndarray:
    return (left.astype(np.int64) << 32) | right


def _counted(keys: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    if not len(keys):
        return keys, keys, keys
    order = np.argsort(keys, kind="stable")
    keys, weights = keys[order], weights[order]
    first = np.flatnonzero(np.concatenate(([True], keys[1:] != keys[:-1])))
    return keys[first] >> 32, keys[first] & 0xFFFFFFFF, np.add.reduceat(weights, first)
