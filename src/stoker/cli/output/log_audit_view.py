"""Printing of a click log's audit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from stoker.cli.output.data_view import print_dropped
from stoker.data.ranking.log_audit import COUNTS, LogAudit, lines
from stoker.data.ranking.log_row_view import LogRowView
from stoker.terminal import escape_control_characters


def print_log_audit(audit: LogAudit) -> None:
    """Prints counts, features, ids, periods, leaks from the future, and dropped rows."""
    for label, value in lines(audit):
        print(f"{label:<20} {value}")
    _print_table(("feature", "kind", "found by", "as"), audit.columns)
    rows = [
        (
            name,
            f"{found.ids:,}",
            f"{found.lookups:,}",
            f"{found.once:.1%}",
            "-" if found.new_a_period is None else f"{found.new_a_period:,.1f}",
            "-" if found.unseen is None else f"{found.unseen:.1%}",
            *(f"{ids:.0%} / {lookups:.1%}" for ids, lookups in (found.covered[least] for least in COUNTS[1:])),
            *([] if found.admitted is None else ["{:.0%} / {:.1%}".format(*found.admitted)]),
        )
        for name, found in audit.ids.items()
    ]
    counts = [f"seen {least}+: ids / lookups" for least in COUNTS[1:]]
    counts += ["admitted: ids / lookups"] if any(found.admitted is not None for found in audit.ids.values()) else []
    _print_table(("ids of", "different", "lookups", "seen once", "new a period", "held out unseen", *counts), rows)
    labels = [f"positive {name}" for name in audit.labels]
    periods = [(p.name, f"{p.rows:,}", *(f"{rate:.2%}" for rate in p.rates)) for p in audit.periods]
    _print_table(("period", "rows", *labels), periods)
    for name, share in audit.missing.items():
        if share:
            print(f"{name} is missing in {share:.1%} of the rows")
    for warning in audit.warnings:
        print(f"warning: {escape_control_characters(warning)}")
    for leak in audit.leaks:
        print(f"leakage: {escape_control_characters(leak)}")
    for name, count in audit.unknown.items():
        print(f"not read: {escape_control_characters(name)}, in {count:,} rows, which is in none of the first rows")
    print_dropped(audit.reasons, audit.dropped)
    for row in audit.rows:
        _print_row(row)


def _print_row(row: LogRowView) -> None:
    where = f"\n--- {row.source}:{row.row}:"
    if row.dropped:
        print(f"{where} dropped: {escape_control_characters(row.dropped)}")
        return
    print(f"{where} {row.part or 'in no part of the run'}")
    fields = [(each.name, each.kind, each.value, each.encoded) for each in row.fields]
    _print_table(("column", "kind", "in the file", "in the model"), fields)


def _print_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    table = [head, *(tuple(map(escape_control_characters, row)) for row in rows)]
    if len(table) == 1:
        return
    widths = [max(len(row[column]) for row in table) for column in range(len(head))]
    print()
    for row in table:
        print("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())
    print()
