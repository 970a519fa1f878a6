"""Printing of a ranking model's metrics."""

from __future__ import annotations

from collections.abc import Mapping

from stoker.terminal import escape_control_characters
from stoker.train.ranking.evaluation_metrics import RankingFigure, RankingFigures

SHOWN = 20  # values shown per slice: the first ones, as the most frequent are not known here


def print_ranking(found: RankingFigures) -> None:
    """Prints a table of the metrics by label, and one for each slice."""
    from rich.table import Table

    from stoker.console import Console

    table = Table(box=None, header_style="bold")
    for name in (*(["label"] if len(found.labels) > 1 else []), "metric"):
        table.add_column(name)
    for name in ("value", "95 % interval"):
        table.add_column(name, justify="right")
    for label, figures in found.labels.items():
        for name, figure in figures.items():
            table.add_row(*([label] if len(found.labels) > 1 else []), name, f"{figure.value:.4f}", _interval(figure))
    console = Console(soft_wrap=True, highlight=False)
    console.print(table)
    for label, columns in found.slices.items():
        for column, values in columns.items():
            console.print(_slices(f"{column}: {label}" if len(found.labels) > 1 else column, values))
    for name in found.further.get("columns_missing", ()):
        print(f"no row has a value in column {name!r}, so there are no metrics by it")
    print(f"{found.rows:,} rows; {found.rows_dropped:,} dropped; step {found.further.get('step')}")


def _slices(column: str, values: Mapping[str, Mapping[str, RankingFigure]]) -> object:
    from rich.table import Table

    table = Table(box=None, header_style="bold")
    table.add_column(escape_control_characters(column))
    names = ("auc", "log_loss", "calibration", "positive_rate")
    for name in names:
        table.add_column(name, justify="right")
    for value, figures in list(values.items())[:SHOWN]:
        table.add_row(
            escape_control_characters(value), *(f"{figures[n].value:.4f}" if n in figures else "-" for n in names)
        )
    return table


def _interval(figure: RankingFigure) -> str:
    values = figure.as_json()
    return f"{values['low']:.4f} to {values['high']:.4f}" if "low" in values else "-"
