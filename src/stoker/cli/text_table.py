"""Tables of the command line."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, width: int | None = None) -> None:
    """Prints rows under bold names of columns.

    Args:
        columns: names; columns of numbers, which are aligned on the right, have ``>`` before theirs.
        width: of the table; by default the terminal's.
    """
    from rich.table import Table

    from stoker.console import Console

    table = Table(box=None, header_style="bold")
    for column in columns:
        table.add_column(column.removeprefix(">"), justify="right" if column.startswith(">") else "left")
    for row in rows:
        table.add_row(*row)
    Console(width=width, soft_wrap=True, highlight=False).print(table)
