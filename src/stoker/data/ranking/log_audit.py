"""The audit of a click log: its columns, counts of ids and of new ids, and features that leak the label."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np

from stoker.data.files.rows import Rejected
from stoker.data.ranking.click_log import ClickLog, RowSet
from stoker.data.ranking.features import NUMBERS, Column
from stoker.data.ranking.log_batch import positions
from stoker.data.ranking.log_row_view import LogRowView
from stoker.data.ranking.ranking_block import AdmissionBlock
from stoker.errors import Problem
from stoker.splitmix64 import GOLDEN, mix64

COUNTS = (1, 2, 5, 10)  # sightings by which the admission of an id may be decided
PERIODS_SHOWN = 14
TELLING = 0.95  # the AUC of one number alone from which on it counts as a leak of the label
SAMPLE = 200_000  # rows that the leak test reads


def chance_of_row(occurrences: np.ndarray, count: int, probability: float) -> np.ndarray:
    """Returns the probability that ids with these numbers of occurrences get a row.

    From the ``count``-th occurrence of an id on, each admits it with ``probability``.
    """
    return 1 - (1 - probability) ** np.maximum(occurrences - count + 1, 0)


@dataclass(frozen=True)
class IdAudit:
    """Counts of a feature's ids.

    Attributes:
        ids: distinct ids in the training rows.
        lookups: ids of all training rows, repetitions included.
        empty: rows without an id.
        once: fraction of the ids that occur once.
        covered: by a number of occurrences, (fraction of the ids, fraction of the lookups) of ids with at least as
            many.
        admitted: the same of the ids that the job's own rule admits, in expectation; None without a rule.
        new_a_period: distinct ids whose first row is in each period after the first, on average.
        unseen: fraction of the held-out lookups whose id is not in the training rows.
    """

    ids: int
    lookups: int
    empty: int
    once: float
    covered: dict[int, tuple[float, float]]
    admitted: tuple[float, float] | None
    new_a_period: float | None
    unseen: float | None


@dataclass(frozen=True)
class Period:
    """Rows of a day, of a file, or of a tenth of the log.

    Attributes:
        rates: share of positive rows, by label.
    """

    name: str
    rows: int
    rates: tuple[float, ...]


@dataclass(frozen=True)
class LogAudit:
    """The report of `stoker data` on a click log.

    Attributes:
        columns: of the features, (name, kind, why, details).
        ids: by feature with ids.
        missing: by numeric feature, the fraction of rows without a value.
        leaks: possible leaks of the future into training, as text for people.
        problems: reasons to refuse training.
        warnings: see `stoker.data.ranking.log_warnings`.
        rows: those that were asked for.
    """

    rows_in: int
    rows_used: int
    training: int
    held_out: int
    labels: dict[str, float]
    time: str | None
    group: str | None
    columns: tuple[tuple[str, str, str, str], ...]
    ids: dict[str, IdAudit]
    missing: dict[str, float]
    periods: tuple[Period, ...]
    leaks: tuple[str, ...]
    reasons: dict[str, int]
    dropped: tuple[Rejected, ...]
    unknown: dict[str, int]
    problems: tuple[Problem, ...] = field(default=())
    warnings: tuple[str, ...] = field(default=())
    rows: tuple[LogRowView, ...] = field(default=())

    def as_json(self) -> dict[str, Any]:
        """Returns the values for ``--json``."""
        found = asdict(self)
        found["columns"] = [dict(zip(("name", "kind", "why", "details"), c, strict=True)) for c in self.columns]
        return {"ok": not self.problems, **found}


def audit_log(
    log: ClickLog,
    problems: Sequence[Problem] = (),
    *,
    admission: AdmissionBlock | None = None,
    warnings: Sequence[str] = (),
) -> LogAudit:
    """Returns the audit of an opened log; reads every column once.

    Args:
        problems: those of `stoker.data.ranking.log_gate`.
        warnings: those of `stoker.data.ranking.log_warnings`.
        admission: the job's rule; None where every id has a row.
    """
    store, features, training = log.training.store, log.features, log.training
    summaries = [other.summary for other in log.stores]
    rates = training.labels.mean(0, dtype=np.float64) if len(training) else []
    numbers = {column.name: number for number, column in enumerate(features.columns)}
    ids = {c.name: _ids(log, numbers[c.name], admission) for c in features.ids if c.stored and c.kind != "buckets"}
    missing = {
        c.name: float(np.isnan(store.array(f"column{numbers[c.name]}")[training.rows]).mean())
        for c in features.columns
        if c.kind in NUMBERS
    }
    return LogAudit(
        rows_in=sum(summary.rows_in for summary in summaries),
        rows_used=sum(summary.rows for summary in summaries),
        training=len(training),
        held_out=len(log.held_out) if log.held_out else 0,
        labels={name: float(rate) for name, rate in zip(features.labels, rates, strict=True)},
        time=features.time,
        group=features.group,
        columns=tuple((c.name, c.kind, c.why, _details(c)) for c in features.columns),
        ids=ids,
        missing=missing,
        periods=tuple(_periods(training)),
        leaks=tuple(_leaks(log)),
        reasons=dict(sum((Counter(summary.reasons) for summary in summaries), Counter())),
        dropped=tuple(row for summary in summaries for row in summary.rejected),
        unknown=dict(sum((Counter(summary.unknown) for summary in summaries), Counter())),
        problems=tuple(problems),
        warnings=tuple(warnings),
    )


def _details(column: Column) -> str:
    if column.kind == "dense":
        return f"{'log, ' if column.log else ''}mean {column.mean:.4g}, scale {column.scale:.4g}"
    if column.kind == "buckets":
        return f"{len(column.boundaries) + 1} buckets"
    words = [f"table {column.table}"] if column.table != column.name else []
    words += [f"separated by {column.separator!r}"] if column.separator else []
    words += ["with weights"] if column.weighted else []
    words += [f"the newest {column.longest}"] if column.longest else []
    return ", ".join(words)


def _places(rows: RowSet, number: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the position of each of the rows' ids in their column, and the row of each id."""
    begin, lengths = rows.store.spans(number, rows.rows)
    return positions(begin, lengths), np.repeat(np.arange(len(rows)), lengths)


def _ids(log: ClickLog, number: int, admission: AdmissionBlock | None) -> IdAudit:
    column = f"column{number}"
    at, row = _places(log.training, number)
    ids = log.training.store.array(column)[at]
    found, first, counts = np.unique(ids, return_index=True, return_counts=True)
    total = max(1, len(ids))
    covered = {
        least: (float((counts >= least).mean()) if len(counts) else 0.0, float(counts[counts >= least].sum()) / total)
        for least in COUNTS
    }
    admitted: tuple[float, float] | None = None
    if admission is not None:
        chance = chance_of_row(counts, admission.count, admission.probability)
        admitted = float(chance.mean()) if len(counts) else 0.0, float((chance * counts).sum()) / total
    new: float | None = None
    periods = log.training.periods()
    if len(found) and len(different := np.unique(periods)) > 1:
        of_first = periods[row[first]]  # rows are in the order of time, so an id's first place is its first sighting
        new = float((of_first > different[0]).sum()) / (len(different) - 1)
    unseen: float | None = None
    if log.held_out is not None:
        at, _ = _places(log.held_out, number)
        later = log.held_out.store.array(column)[at]
        unseen = float((~np.isin(later, found)).mean()) if len(later) else None
    empty = len(log.training) - len(np.unique(row))
    once = float((counts == 1).mean()) if len(counts) else 0.0
    return IdAudit(
        ids=len(found),
        lookups=len(ids),
        empty=empty,
        once=once,
        covered=covered,
        admitted=admitted,
        new_a_period=new,
        unseen=unseen,
    )


def _periods(training: RowSet) -> Iterator[Period]:
    labels, periods = training.labels, training.periods()
    is_days, by_file = training.features.time_unit is not None, training.by_file
    files = training.store.summary.files
    for number in np.unique(periods)[-PERIODS_SHOWN:]:
        chosen = periods == number
        name = f"part {number + 1}"
        if is_days:
            name = (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(days=int(number))).date().isoformat()
        elif by_file:
            name = files[number]
        yield Period(name, int(chosen.sum()), tuple(float(rate) for rate in labels[chosen].mean(0, dtype=np.float64)))


def _leaks(log: ClickLog) -> Iterator[str]:
    """Yields possible leaks: facts that a model sees in training but not when it is used."""
    training, held_out = log.training, log.held_out
    if held_out is not None and log.features.time is not None and len(held_out) and len(training):
        begins = held_out.column("time").min()
        late = int((training.column("time") > begins).sum())
        if late:
            yield f"{late:,} training rows are later than the first held-out one"
    if held_out is not None and log.features.time is None:
        yield "no time column: the last rows are held out, but they may not be the latest"
    spaced = training.rows[:: max(1, -(-len(training) // SAMPLE))]
    labels = training.store.array("labels")[spaced].T
    for number, column in enumerate(log.features.columns):
        if column.kind not in NUMBERS:
            continue
        values = training.store.array(f"column{number}")[spaced]
        for name, known in zip(log.features.labels, labels, strict=True):
            found = _auc(values, known)
            if found is not None and max(found, 1 - found) >= TELLING:
                yield f"{column.name} alone predicts {name} (AUC {found:.3f}): known in advance?"
    if held_out is not None and (again := int(np.isin(_digests(held_out), _digests(training)).sum())):
        yield f"{again:,} held-out rows are in the training part too, with all their features and labels"


def _auc(values: np.ndarray, labels: np.ndarray) -> float | None:
    """Returns the AUC of a number, from the rank sums of its positive rows; None without rows of both kinds."""
    there = ~np.isnan(values)
    values, positive = values[there], labels[there] > 0
    positives, negatives = int(positive.sum()), int((~positive).sum())
    if not positives or not negatives:
        return None
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    return float((ranks[positive].sum() - positives * (positives + 1) / 2) / positives / negatives)


def _digests(rows: RowSet) -> np.ndarray:
    """Returns a digest of each row's labels and features."""
    total = np.zeros(len(rows), dtype=np.uint64)
    with np.errstate(over="ignore"):
        for number, column in enumerate(rows.features.columns):
            if not column.stored:
                continue
            if column.kind in NUMBERS:
                values = rows.store.array(f"column{number}")[rows.rows].astype(np.float64).view(np.uint64)
            else:
                values = _digests_of_ids(rows, number, column)
            total = mix64(total * GOLDEN + values)
        for label in rows.labels.T:
            total = mix64(total * GOLDEN + label.astype(np.uint64))
    return total


def _digests_of_ids(rows: RowSet, number: int, column: Column) -> np.ndarray:
    """Returns a digest of each row's ids and weights; for a sequence it also depends on their order."""
    at, row = _places(rows, number)
    lengths = np.bincount(row, minlength=len(rows))
    ends = np.cumsum(lengths)
    items = mix64(rows.store.array(f"column{number}")[at].view(np.uint64) * GOLDEN + GOLDEN)
    if column.weighted:
        items = mix64(items + rows.store.array(f"weights{number}")[at].view(np.uint32))
    if column.kind == "sequence":
        items = mix64(items + (np.arange(len(at)) - (ends - lengths)[row]).astype(np.uint64))
    sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(items, dtype=np.uint64)])
    return mix64(sums[ends] - sums[ends - lengths] + lengths.astype(np.uint64))


def lines(audit: LogAudit) -> Sequence[tuple[str, str]]:
    """Returns the head of the audit, as (label, count) lines."""
    dropped = audit.rows_in - audit.rows_used
    share = dropped / audit.rows_in if audit.rows_in else 0.0
    found = [
        ("rows read", f"{audit.rows_in:,}"),
        ("rows used", f"{audit.rows_used:,}"),
        ("rows dropped", f"{dropped:,} ({share:.1%})"),
        ("training rows", f"{audit.training:,}"),
        ("held out", f"{audit.held_out:,}, the latest" if audit.time else f"{audit.held_out:,}"),
        ("time", audit.time or "none: the order of the rows"),
        ("groups", audit.group or "none"),
    ]
    return [*found, *((f"label {name}", f"{rate:.2%} positive") for name, rate in audit.labels.items())]
