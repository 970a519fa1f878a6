"""Printing of a ranking model's metrics."""

from __future__ import annotations

from collections.abc import Mapping

from stoker.cli.output.text_table import print_table
from stoker.terminal import escape_control_characters
from stoker.train.ranking.evaluation_metrics import RankingFigure, RankingFigures

SHOWN = 20  # values shown per slice: the first ones, as the most frequent are not known here


def print_ranking(found: RankingFigures) -> None:
    """Prints a table of the metrics by label, and one for each slice."""
    several = len(found.labels) > 1
    rows = [
        [*([label] if several else []), name, f"{figure.value:.4f}", _interval(figure)]
        for label, figures in found.labels.items()
        for name, figure in figures.items()
    ]
    print_table([*(["label"] if several else []), "metric", ">value", ">95 % interval"], rows)
    for label, columns in found.slices.items():
        for column, values in columns.items():
            _print_slices(f"{column}: {label}" if several else column, values)
    for name in found.further.get("columns_missing", ()):
        print(f"no row has a value in column {name!r}, so there are no metrics by it")
    shares = [f"{name} {share:.1%}" for name, share in found.further.get("ids_without_row", {}).items() if share]
    if shares:
        print(f"ids without a row: {escape_control_characters(', '.join(shares))}")
    if "items" in found.further:
        print(f"retrieval ranks {found.further['items']:,} items by {found.further['items_by']}")
        if not any(name.startswith("retrieval_") for figures in found.labels.values() for name in figures):
            print("no group has a positive item that it did not have before, so there are no retrieval metrics")
    print(f"{found.rows:,} rows; {found.rows_dropped:,} dropped; step {found.further.get('step')}")


def _print_slices(column: str, values: Mapping[str, Mapping[str, RankingFigure]]) -> None:
    names = ("auc", "log_loss", "calibration", "positive_rate")
    rows = [
        [escape_control_characters(value), *(f"{figures[n].value:.4f}" if n in figures else "-" for n in names)]
        for value, figures in list(values.items())[:SHOWN]
    ]
    print_table([escape_control_characters(column), *(f">{name}" for name in names)], rows)


def _interval(figure: RankingFigure) -> str:
    values = figure.as_json()
    return f"{values['low']:.4f} to {values['high']:.4f}" if "low" in values else "-"
