"""Progress display of a run: one live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import os
import time
from collections import deque
from statistics import fmean
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich.console import ConsoleDimensions
from rich.live import Live
from rich.table import Table

from stoker.console import Console
from stoker.runs.step_metrics import StepMetrics
from stoker.terminal import Output

if TYPE_CHECKING:  # a process that only shows progress need not load the training code
    from stoker.train.evaluate import Evaluation

SCORE = "score"  # what a policy is trained for; its loss says little
LINES = 100  # approximate maximum of plain lines per run


class ProgressConsole(Console):
    """A console that survives a closed pipe (`stoker train job.yaml | head`): training continues without output."""

    def on_broken_pipe(self) -> None:
        """Called by rich, whose default would end the process."""
        self.quiet = True


class KeptConsole(ProgressConsole):
    """Console on the process' original terminal or pipe, after standard output was redirected to a log."""

    def __init__(self, descriptor: int) -> None:
        terminal: Any = Output(os.fdopen(descriptor, "w", encoding="utf-8"), escapes=False)
        super().__init__(file=terminal, highlight=False)
        self._descriptor = descriptor

    @property
    def size(self) -> ConsoleDimensions:
        """Columns and rows of the terminal; rich would measure the log."""
        if not self.is_terminal:
            return super().size
        columns, rows = os.get_terminal_size(self._descriptor)
        return ConsoleDimensions(columns, rows)

    @size.setter
    def size(self, _: tuple[int, int]) -> None:
        raise AttributeError("the size is the terminal's")


class Display:
    """Progress display of a run; silent with ``quiet``.

    Args:
        console: output console; by default standard output, captured so that other prints do not mix with it.
    """

    steps = 0  # total steps of the run; set by the loop

    def __init__(self, unit: str, *, console: Console | None = None, quiet: bool = False) -> None:
        self.unit, self.quiet = unit, quiet
        self.console = console or ProgressConsole(highlight=False)
        own = console is None
        self._live = (
            Live(console=self.console, auto_refresh=False, transient=True, redirect_stdout=own, redirect_stderr=own)
            if self.console.is_terminal
            else None
        )
        self._recent: deque[float] = deque(maxlen=20)
        self._held_out: Evaluation | None = None
        self._begin = time.perf_counter()

    def __enter__(self) -> Display:
        if self._live and not self.quiet:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live and not self.quiet:
            self._live.stop()

    def step(self, m: StepMetrics) -> None:
        """Shows a finished step."""
        if self.quiet:
            return
        self._recent.append(m.seconds)
        if self._live:
            self._live.update(self._table(m), refresh=True)
        elif m.step == self.steps or m.step <= 3 or m.step % max(1, self.steps // LINES) == 0:
            self.console.print(self._line(m), soft_wrap=True)

    def evaluated(self, step: int, evaluation: Evaluation) -> None:
        """Shows an evaluation."""
        self._held_out = evaluation
        accuracy, target = evaluation.accuracy, evaluation.target
        right = f"  {target} accuracy {accuracy:.1%}" if accuracy is not None else ""
        score = evaluation.measures.get(SCORE)
        found = f"loss {evaluation.loss:.4f}" if score is None else f"{SCORE} {score:.4f}"
        self.note(f"held out at step {step}: {found}{right}")

    def note(self, text: str) -> None:
        """Prints a permanent line."""
        if not self.quiet:
            self.console.print(text, soft_wrap=True, markup=False)

    def _line(self, m: StepMetrics) -> str:
        return (
            f"step {m.step}/{self.steps}  {_goal(m)}  grad {m.grad_norm:.3g}  lr {m.lr:.2e}  "
            f"{m.tokens_per_s:,.0f} {self.unit}s/s  {m.memory_gib:.2f} GiB  left {self._left(m.step)}"
        )

    def _left(self, step: int) -> str:
        seconds = round((self.steps - step) * fmean(self._recent))
        hours, rest = divmod(seconds, 3600)
        return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"

    def _table(self, m: StepMetrics) -> Table:
        width = 24
        filled = width * m.step // self.steps
        table = Table.grid(padding=(0, 2))
        held_out = f"held out [green]{self._held_out.loss:.4f}[/]" if self._held_out else ""
        table.add_row(
            f"[cyan]{'█' * filled}[/][dim]{'░' * (width - filled)}[/] {m.step}/{self.steps}",
            f"[bold]{_goal(m)}[/]",
            held_out,
            f"{m.tokens_per_s:,.0f} {self.unit}s/s",
            f"{m.memory_gib:.2f} GiB",
            f"left {self._left(m.step)}",
        )
        return table


def _goal(m: StepMetrics) -> str:
    """Formats the quantity that a step is judged by."""
    return f"{SCORE} {m.measures[SCORE]:.4f}" if SCORE in m.measures else f"loss {m.loss:.4f}"
