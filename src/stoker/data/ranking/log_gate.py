"""Refuses click logs that must not be trained on, with advice."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from stoker.data.files.byte_streams import DAMAGED, REPLACE
from stoker.data.ranking.cell_forms import lost_forms
from stoker.data.ranking.click_log import ClickLog
from stoker.data.ranking.column_files import LogSummary, in_words
from stoker.data.ranking.drop_hints import CLICK_FIRST, drop_hint
from stoker.data.ranking.features import Features
from stoker.errors import Problem
from stoker.job.blocks.source_block import SourceBlock

NAMED = 3  # dropped rows that a problem names


def log_problems(
    log: ClickLog, data: Sequence[SourceBlock], held_out: Sequence[SourceBlock], *, each_file: bool = False
) -> list[Problem]:
    """Returns the problems of a log: too many rows dropped, or labels from which nothing can be learnt.

    These are a label that is the same in all rows, and a conversion that follows every click.

    Args:
        each_file: whether no single file may lose more than ``max_dropped`` of its rows either, be damaged (one dropped
            row then stands for all that are lost), or have lists as texts or integers as floats.
    """
    problems = []
    for store, blocks, key in zip(log.stores, (data, held_out), ("data", "evaluate.data"), strict=False):
        summary, allowed = store.summary, min(block.max_dropped for block in blocks)
        dropped = summary.rows_in - summary.rows
        if dropped > allowed * summary.rows_in:
            places = "; ".join(f"{row.source}:{row.row}: {row.reason}" for row in summary.rejected[:NAMED])
            kinds = in_words(summary.reasons)
            message = f"{dropped:,} of {summary.rows_in:,} rows are dropped, more than max_dropped: {kinds} ({places})"
            hint = f"mend them, or write `max_dropped: {_share(dropped, summary.rows_in)}`"
            hint = drop_hint(summary, log.features) or hint
            problems.append(Problem(message, hint, key=f"{key}[0].max_dropped"))
            continue
        damage = next((row for row in summary.rejected if row.reason.startswith(DAMAGED)), None)
        if damage is not None and each_file and allowed < 1:
            message = f"{damage.source}:{damage.row}: {damage.reason}; more rows than this one are lost"
            problems.append(Problem(message, REPLACE, key=f"{key}[0].max_dropped"))
        for name, part in summary.parts.items() if each_file else ():
            if part.dropped > allowed * part.rows_in:
                lost, share = f"{part.dropped:,} of {part.rows_in:,}", _share(part.dropped, part.rows_in)
                message = f"{name}: {lost} rows are dropped, more than max_dropped: {in_words(part.reasons)}"
                hint = f"mend this file or move it out of the folder, or write `max_dropped: {share}`"
                problems.append(Problem(message, hint, key=f"{key}[0].max_dropped"))
        problems += _lost_forms(summary, log.features, f"{key}[0].path") if each_file else []
    labels = log.training.labels
    if log.features.nested and (clicked := labels[labels[:, 0] > 0, 1]).all() and len(clicked):
        click, conversion = log.features.labels
        message = f"label {conversion} is 1 in all {len(clicked):,} training rows in which {click} is 1"
        problems.append(Problem(message, CLICK_FIRST, key="ranking.label"))
    for number, name in enumerate(log.features.labels):
        rate = float(labels[:, number].mean())
        if rate in (0.0, 1.0):
            message = f"label {name} is {rate:.0f} in all {len(labels):,} training rows, so there is nothing to learn"
            hint, key = "name another column, or write the smallest positive value", "ranking.label"
            if (least := log.features.positive) is not None:
                message = f"label {name} is below {least:g} in all {len(labels):,} training rows"
                if rate:
                    message = f"label {name} is at least {least:g} in all {len(labels):,} training rows"
                hint, key = "write another `ranking.positive`, or omit it if labels are 0 and 1", "ranking.positive"
            problems.append(Problem(message, hint, key=key))
    return problems


def _lost_forms(summary: LogSummary, features: Features, key: str) -> Iterable[Problem]:
    """Returns the problem of the first file of each column whose cells lost their form."""
    columns = {column.name: column for column in features}
    found: dict[str, Problem] = {}
    for file, part in summary.parts.items():
        for name, message, hint in lost_forms(columns, part.forms):
            found.setdefault(name, Problem(f"{file}: {message}", hint, key=key))
    return found.values()


def _share(dropped: int, rows: int) -> str:
    """Returns the share of dropped rows in hundredths, rounded up."""
    return f"{-(-100 * dropped // rows) / 100:g}"
