"""Statistics of the ids that a log looks up: total, unique per batch, and the share of the most frequent."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from stoker.data.mix import shuffled_epochs
from stoker.data.ranking.click_log import ClickLog
from stoker.data.ranking.log_audit import chance_of_row
from stoker.models.ranking.model_inputs import RankingShape
from stoker.sparse.fused_tables import Feature, FeatureBags
from stoker.sparse.table_keys import Keys
from stoker.sparse.table_settings import Eviction, TableSettings
from stoker.train.ranking.ranking_batch import ids_looked_up, ranking_batch_of

READ = 2**22  # rows sampled for counting ids; a larger log is sampled at even spacing
AT_ONCE = 2**16
SAMPLED = 8  # batches sampled to count unique ids per batch


@dataclass(frozen=True)
class IdUse:
    """Id statistics of tables with one layout.

    Attributes:
        counts: by table, the frequency of each sampled id, largest first.
        longer: by table, ids of the whole log divided by sampled ids.
        read: rows of the log that were sampled.
        kept: by table, the share of its rows that a limit keeps; empty without limits.
    """

    tables: tuple[TableSettings, ...]
    counts: tuple[np.ndarray, ...]
    longer: tuple[float, ...]
    read: int
    kept: tuple[float, ...] = ()

    def rows(self, number: int) -> int:
        """Returns the rows of a table at the end of an epoch; evictions count only where a limit applies.

        Ids have rows as the admission rule gives them in expectation.
        """
        admission, counts = self.tables[number].admission, self.counts[number]
        ids = chance_of_row(counts, admission.count, admission.probability).sum() if admission else len(counts)
        kept = self.kept[number] if self.kept else 1.0
        return round(float(ids) * self.longer[number] * kept)

    @property
    def total(self) -> int:
        """Rows of all tables."""
        return sum(self.rows(number) for number in range(len(self.tables)))

    def lookups(self, number: int) -> float:
        """Returns the mean number of ids of a table in a row of the log."""
        return float(self.counts[number].sum()) / max(1, self.read)

    def covered(self, number: int, share: float) -> float:
        """Returns the share of a table's lookups that go to its most frequent rows.

        Args:
            share: share of the rows.
        """
        counts = self.counts[number]
        return float(counts[: max(1, round(share * len(counts)))].sum()) / max(1, counts.sum())


def within_limits(uses: Sequence[IdUse], steps: int) -> list[IdUse]:
    """Applies ``max_rows`` to the statistics: the limit plus the ids that arrive until the next eviction pass.

    Limits that spare rows by age, frequency or norm are ignored. New ids are assumed to arrive evenly.

    Args:
        steps: steps of an epoch.
    """
    tables = [(use, number, table.eviction) for use in uses for number, table in enumerate(use.tables)]
    shares: dict[Eviction | None, float] = {}
    for rule in dict.fromkeys(rule for *_, rule in tables if rule is not None and _is_limit(rule)):
        total = sum(use.rows(number) for use, number, own in tables if own == rule)
        most = (rule.max_rows or 0) + total * min(1.0, rule.every / max(1, steps))
        shares[rule] = min(1.0, most / max(1, total))
    return [replace(use, kept=tuple(shares.get(table.eviction, 1.0) for table in use.tables)) for use in uses]


def _is_limit(rule: Eviction) -> bool:
    return bool(rule.max_rows) and rule.frequency is None and rule.norm is None and rule.age <= rule.every


class LogReader:
    """Reads the ids that training would look up.

    Args:
        layouts: tables, grouped by layout.
        features: how features are looked up.
    """

    def __init__(
        self,
        log: ClickLog,
        shape: RankingShape,
        layouts: Sequence[Sequence[TableSettings]],
        features: dict[str, Feature],
        *,
        first_order: bool,
    ) -> None:
        self._log, self._shape, self._first_order, self._layouts = log, shape, first_order, layouts
        self._bags = [
            FeatureBags(tables, features, device=torch.device("cpu"), dtype=torch.float32) for tables in layouts
        ]

    def uses(self) -> list[IdUse]:
        """Returns the statistics by layout. For a log too long to read, ids are assumed to grow as a power of its
        length.
        """
        size = len(self._log.training)
        read = min(size, READ)
        rows = np.arange(read) * size // max(1, read)
        # Even rows first: a sample of half the density over the same time shows how ids grow with its size.
        pieces = [
            piece for half in (rows[::2], rows[1::2]) for piece in np.array_split(half, -(-read // (2 * AT_ONCE)))
        ]
        met = [self._keys(piece) for piece in pieces]
        found = []
        for number, tables in enumerate(self._layouts):
            keys = [piece[number] for piece in met]
            counts, before = _counted(keys, len(tables)), _counted(keys[: len(keys) // 2], len(tables))
            ids = zip(map(len, counts), map(len, before), strict=True)
            longer = tuple(_growth(whole, half, size / max(1, read)) for whole, half in ids)
            found.append(IdUse(tuple(tables), counts, longer, read))
        return found

    def batches(self, rows: int, *, in_order: bool) -> Iterator[list[Keys]]:
        """Yields the keys of some batches, by layout."""
        size = len(self._log.training)
        for number in range(SAMPLED):
            begin = number * max(0, size - rows) // max(1, SAMPLED - 1)
            places = np.arange(begin, min(size, begin + rows))
            yield self._keys(places if in_order else shuffled_epochs(places, size, 0, 1))

    def _keys(self, positions: np.ndarray) -> list[Keys]:
        batch = ranking_batch_of(self._log.training.batch(positions), positions, torch.float32)
        ids = ids_looked_up(batch, self._shape, first_order=self._first_order)
        return [bags.bags(ids).keys for bags in self._bags]


def _counted(met: Sequence[Keys], tables: int) -> tuple[np.ndarray, ...]:
    keys = Keys.concatenated(met)
    of_tables = (np.unique(keys.ids[keys.tables == number], return_counts=True)[1] for number in range(tables))
    return tuple(np.sort(counts)[::-1] for counts in of_tables)


def _growth(ids: int, half: int, longer: float) -> float:
    """Returns the growth factor of ids in a log ``longer`` times as long, by Heaps' law (1978).

    Args:
        half: ids in half of the sample.
    """
    if longer <= 1 or not half:
        return 1.0
    return float(longer ** np.clip(np.log2(ids / half), 0.0, 1.0))
