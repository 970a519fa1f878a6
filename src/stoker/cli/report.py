"""Progress on stderr, and suppression of libraries' output."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from types import TracebackType

from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

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


def quiet_environment() -> None:
    """Silences libraries in this process and its children; must be called before they are loaded."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("TQDM_DISABLE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def quiet_libraries() -> None:
    """Suppresses progress bars and advice of libraries."""
    quiet_environment()
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", message=".*torch.distributed is disabled.*")
    logging.disable(logging.WARNING)  # for all libraries: one logs even to standard output
    if "transformers" in sys.modules:  # else the environment variable does, without the import
        from transformers.utils import logging as transformers_logging

        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()
