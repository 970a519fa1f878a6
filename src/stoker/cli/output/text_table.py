"""Tables of the command line."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

WIDEST = 10_000  # characters of a line


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Prints rows under bold names of columns; lines longer than the terminal's wrap as a whole.

    Args:
        columns: names; columns of numbers, which are aligned on the right, have ``>`` before theirs.
    """
    from rich.measure import Measurement
    from rich.table import Table

    from stoker.console import Console

    table = Table(box=None, header_style="bold")
    for column in columns:
        table.add_column(column.removeprefix(">"), justify="right" if column.startswith(">") else "left")
    for row in rows:
        table.add_row(*row)
    console = Console(width=WIDEST, soft_wrap=True, highlight=False, markup=False)
    console.width = Measurement.get(console, console.options, table).maximum
    console.print(table)
