"""Eviction passes, with the same result for any number of shards.

A pass ranks rows exactly by keys of 63 bits, of which the upper half is a score and the lower half a hash of
the id, which breaks ties. The largest evicted key is found digit by digit from histograms (radix
selection), so that shards exchange 256 numbers a table and digit, and no keys. Sums are of integers, so their order
does not matter either.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from stoker.sparse.table_settings import Eviction, TableSettings

if TYPE_CHECKING:
    from stoker.sparse.table_shard import TableShard

_AT_ONCE = 2**16  # rows whose values are read together
_DIGIT, _DIGITS = 8, 8  # bits of a digit of a key, and digits
_ALL, _NONE = np.int64(2**63 - 1), np.int64(0)  # keys below which every row goes, or none
_COARSE, _FINE, _LARGEST = 2.0**-16, 2.0**-48, 2.0**40  # of terms that are summed: two units, and where they end
_LOWER = np.uint64(2**32 - 1)
WEIGHT_KEPT = 0.5  # of earlier passes in the mean of evicted rows

Totals = Callable[[int, str, list[np.ndarray]], np.ndarray]
"""Calls `Candidates.answer` on every shard of a layout, given by its number, and returns the sum."""


@dataclass(frozen=True)
class EvictionPlan:
    """The result of a pass for tables with one layout, the same on every shard.

    Attributes:
        below: int64 [tables]; candidates with a smaller key are evicted.
        evicted: float64 [tables, 2 + width], `stoker.sparse.sparse_state.TableState.evicted` after the pass.
    """

    below: np.ndarray
    evicted: np.ndarray


def is_due(tables: Sequence[TableSettings], step: int) -> bool:
    """Returns whether a pass follows the step that has just ended.

    Args:
        step: steps that have ended.
    """
    return any(_due(table, step) is not None for table in tables)


def _due(table: TableSettings, step: int) -> Eviction | None:
    rule = table.eviction
    return rule if rule is not None and step % rule.every == 0 else None


class Candidates:
    """Rows of a shard that a pass may evict."""

    def __init__(self, shard: TableShard) -> None:
        self._shard, self.step = shard, shard.step
        rows = shard.index.rows
        tables = shard.index.tables[rows]
        self._counts = np.bincount(tables, minlength=len(shard.tables))
        self._rows: list[np.ndarray] = []
        self._keys: list[np.ndarray] = []
        for number, table in enumerate(shard.tables):
            rule = _due(table, self.step)
            mine = rows[tables == number] if rule else rows[:0]
            if rule:
                mine = mine[self.step - 1 - shard.last[mine] >= rule.age]
                if rule.frequency is not None:
                    mine = mine[shard.seen[mine] < rule.frequency]
                if rule.norm is not None:
                    mine = mine[self._norms(mine) < rule.norm]
            self._rows.append(mine)
            self._keys.append(self._ranked(mine, rule) if rule and rule.max_rows else np.zeros(len(mine), np.int64))

    def answer(self, what: str, arrays: list[np.ndarray]) -> np.ndarray:
        """Returns this shard's contribution to the plan of a pass.

        Args:
            what: ``rows``: int64 [tables, 2], rows and candidates. ``digits``: int64 [tables, 256], candidates by
                the next digit of their keys, of those with the given prefix. ``sums``: int64 [tables, 2 + 2 x width],
                of candidates with keys below the given ones: their number, their occurrences, and the sum of their
                values times occurrences in multiples of 2^-16, and of the remainders in multiples of 2^-48.
            arrays: ``digits``: int64 [2], the prefix of the keys, and the number of bits after the digit. ``sums``: the
                keys, int64 [tables].
        """
        if what == "rows":
            return np.stack([self._counts, [len(rows) for rows in self._rows]], axis=1)
        if what == "digits":
            [(begin, shift)] = arrays
            found = [keys[keys >> shift >> _DIGIT == begin] for keys in self._keys]
            return np.stack([np.bincount(keys >> shift & 255, minlength=256) for keys in found])
        assert what == "sums"
        return np.stack([self._sums(number, going) for number, going in enumerate(self.going(arrays[0]))])

    def going(self, below: np.ndarray) -> list[np.ndarray]:
        """Returns the rows with keys below those of a plan, by table."""
        return [rows[keys < most] for rows, keys, most in zip(self._rows, self._keys, below, strict=True)]

    def _sums(self, number: int, rows: np.ndarray) -> np.ndarray:
        table, shard = self._shard.tables[number], self._shard
        found = np.zeros(2 + 2 * table.width, np.int64)
        found[0] = len(rows)
        if table.eviction is not None and table.eviction.default_row == "mean":
            for part in _parts(rows):
                values, seen = shard.values(part).double().numpy(), shard.seen[part].astype(np.int64)
                finite = np.isfinite(values).all(axis=1)
                products = np.clip(values[finite] * seen[finite, None], -_LARGEST, _LARGEST)
                whole = np.floor(products / _COARSE)
                rest = np.floor((products - whole * _COARSE) / _FINE)
                found[1] += seen[finite].sum()
                found[2 : 2 + table.width] += whole.astype(np.int64).sum(0)
                found[2 + table.width :] += rest.astype(np.int64).sum(0)
        return found

    def _ranked(self, rows: np.ndarray, rule: Eviction) -> np.ndarray:
        shard = self._shard
        score = np.ones(len(rows))
        if "norm" in rule.score:
            score *= self._norms(rows)
        if "frequency" in rule.score:
            score *= shard.seen[rows]
        if rule.score == "recency":
            score *= shard.last[rows]
        bits = np.abs(score.astype(np.float32)).view(np.int32).astype(np.int64)  # in the order of the numbers
        hashes = shard.index.hashes(shard.index.ids[rows], shard.index.tables[rows].astype(np.int64))
        return bits << 32 | (hashes & _LOWER).view(np.int64)

    def _norms(self, rows: np.ndarray) -> np.ndarray:
        parts = [self._shard.values(part).double().square().sum(1).sqrt() for part in _parts(rows)]
        return torch.cat(parts).numpy()


def eviction_plans(
    layouts: Sequence[Sequence[TableSettings]], step: int, before: Sequence[np.ndarray], totals: Totals
) -> list[EvictionPlan]:
    """Returns the plans of the pass after a step, by layout. Rows of all tables with the same rule are ranked together.

    Args:
        layouts: those with a table that is due.
        before: float64 [tables, 2 + width], `EvictionPlan.evicted` of the pass before.
    """
    rules = [[_due(table, step) for table in tables] for tables in layouts]
    below = [np.array([_NONE if rule is None else _ALL for rule in some]) for some in rules]
    # In the order of the tables: `totals` is a collective, and the order of a set differs between processes.
    for rule in dict.fromkeys(rule for some in rules for rule in some if rule is not None and rule.max_rows):
        mine = [np.array([other == rule for other in some]) for some in rules]
        key = _limit(rule, mine, totals)
        below = [np.where(chosen, key, keys) for chosen, keys in zip(mine, below, strict=True)]
    sums = [totals(number, "sums", [keys]) for number, keys in enumerate(below)]
    return [EvictionPlan(*plan) for plan in zip(below, map(_after, before, sums), strict=True)]


def _after(before: np.ndarray, sums: np.ndarray) -> np.ndarray:
    """Returns `EvictionPlan.evicted` after rows with these sums were evicted."""
    evicted = before.copy()
    evicted[:, 0] += sums[:, 0]
    for number in np.flatnonzero(sums[:, 1]):
        kept = WEIGHT_KEPT * before[number, 1]
        evicted[number, 1] = kept + sums[number, 1]
        whole, rest = np.split(sums[number, 2:], 2)
        evicted[number, 2:] = (kept * before[number, 2:] + whole * _COARSE + rest * _FINE) / evicted[number, 1]
    return evicted


def _limit(rule: Eviction, mine: Sequence[np.ndarray], totals: Totals) -> np.int64:
    """Returns the key below which candidates are evicted, so that at most ``max_rows`` rows remain.

    Args:
        mine: bool [tables] by layout, the tables with this rule.
    """

    def total(what: str, *arrays: np.ndarray) -> np.ndarray:
        return np.sum([totals(n, what, [*arrays])[chosen].sum(axis=0) for n, chosen in enumerate(mine)], axis=0)

    assert rule.max_rows is not None
    rows, candidates = total("rows")
    left = min(max(0, rows - rule.max_rows), candidates)
    if left in (0, candidates):
        return _ALL if left else _NONE
    key = np.int64(0)
    for shift in range(_DIGIT * (_DIGITS - 1), -1, -_DIGIT):
        reached = total("digits", np.array([key, shift])).cumsum()
        digit = int(np.searchsorted(reached, left))
        left -= reached[digit - 1] if digit else 0
        key = key << _DIGIT | digit
    return key + 1


def _parts(rows: np.ndarray) -> list[np.ndarray]:
    return np.split(rows, range(_AT_ONCE, len(rows), _AT_ONCE))
