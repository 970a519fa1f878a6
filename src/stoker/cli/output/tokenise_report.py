"""Progress of the tokenisation on stderr."""

from __future__ import annotations

import sys
from types import TracebackType

from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from stoker.cli.output.quiet_libraries import quiet_libraries
from stoker.console import Console

LINE_EVERY = 50_000  # rows between two plain lines without a terminal


class TokeniseReport:
    """Callback for tokenisation progress: a live line per source on a terminal, occasional lines elsewhere."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        columns = (
            TextColumn("tokenising {task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
        )
        self._progress = Progress(*columns, console=console, transient=True) if console.is_terminal else None
        self._lines: dict[str, int] = {}

    def __enter__(self) -> TokeniseReport:
        if self._progress:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress:
            self._progress.stop()

    def __call__(self, source: str, rows: int, tokens: int, share: float | None) -> None:
        text = f"{source}: {rows:,} rows, {tokens:,} tokens"
        if self._progress is None:
            if rows // LINE_EVERY > self._lines.get(source, 0) // LINE_EVERY:
                print(f"tokenising {text}", file=sys.stderr)
            self._lines[source] = rows
            return
        if source not in self._lines:
            self._lines[source] = self._progress.add_task(text, total=None if share is None else 1.0)
        self._progress.update(self._lines[source], description=text, completed=share)  # type: ignore[arg-type]


def quiet_report() -> TokeniseReport:
    """Returns the display of tokenisation progress, after the libraries in this process have been silenced."""
    quiet_libraries()
    return TokeniseReport()
