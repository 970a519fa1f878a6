"""Layouts against one process: each runs a job's twin, and whatever it computes has to be the same."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from stoker.errors import Problem, UserError
from stoker.job.layout import Layout, layout_of
from stoker.job.load import load_job
from stoker.launch.failure import RankFailed
from stoker.launch.pool import Pool
from stoker.models.families import family_of
from stoker.train.cells import Cell, reference_of
from stoker.train.trace import Comparison, Trace, compare, trace
from stoker.train.twin import Twin

BOUND = 1e-10  # in float64, of a model whose family states no other
TIMEOUT = 300.0  # seconds of one run


@dataclass(frozen=True)
class Verdict:
    """What came of a layout.

    Attributes:
        layout: None where the layout is not even well-formed.
        comparison: None where it did not run.
        passed: None where the layout cannot be, for which ``reason`` says why.
        reason: of a failure, what differs; empty where it passed.
        seconds: that it took, the run in one process included where it was the first to need it.
    """

    cell: Cell
    layout: Layout | None
    comparison: Comparison | None
    passed: bool | None
    reason: str
    seconds: float

    def as_json(self) -> dict[str, Any]:
        """The verdict as other programs read it; differences are null where nothing was compared."""
        found: dict[str, Any] = {
            "name": self.cell.name,
            "layout": asdict(self.layout) if self.layout else self.cell.parallel,
            "world": self.layout.world if self.layout else None,
        }
        quantities = ("loss", "grad_norm", "gradient", "weight")
        for key, quantity in zip(("loss", "grad_norm", "grad", "weight"), quantities, strict=True):
            found[f"max_{key}_diff"] = getattr(self.comparison, quantity).size if self.comparison else None
        return {**found, "passed": self.passed, "reason": self.reason, "seconds": round(self.seconds, 2)}


class Verifier:
    """Verifies layouts of one twin; what one process computes is computed once and kept.

    Args:
        pool: at least as large as the largest layout that is to be verified.
        bound: largest difference; by default the family's.
    """

    def __init__(self, twin: Twin, pool: Pool, *, bound: float | None = None) -> None:
        family = family_of(twin.config) if twin.config is not None else None
        self.twin, self.pool = twin, pool
        self.bound = bound if bound is not None else family.bound if family else BOUND
        self._references: dict[str, Trace] = {}

    def verdicts(self, cells: Iterable[Cell]) -> Iterator[Verdict]:
        """One after the other, as they come."""
        return (self.verdict(cell) for cell in cells)

    def verdict(self, cell: Cell) -> Verdict:
        """Runs a layout and compares it.

        Raises:
            UserError: the twin does not run in one process either.
        """
        begin = time.perf_counter()
        layout = None

        def told(passed: bool | None, reason: str = "", comparison: Comparison | None = None) -> Verdict:
            return Verdict(cell, layout, comparison, passed, reason, time.perf_counter() - begin)

        path = self.twin.job_file(cell)
        try:
            layout = layout_of(load_job(path).job)
        except UserError as error:
            return told(None, _words(error))
        if layout.world > self.pool.size:
            return told(None, f"it needs {layout.world} processes, and {self.pool.size} are here")
        reference = self._reference(cell)
        try:
            run = self._run(str(path), layout.world)
        except RankFailed as error:
            return told(False, _words(error) + _cause(error))
        except UserError as error:  # every rank's, whichever said it first
            return told(None, re.sub(r"^rank \d+: ", "", _words(error)))
        except TimeoutError as error:
            return told(False, str(error))
        comparison = compare(run, reference)
        beyond = comparison.first_beyond(self.bound)
        return told(beyond is None, beyond + reference.remark if beyond else "", comparison)

    def _reference(self, cell: Cell) -> Trace:
        path = self.twin.job_file(reference_of(cell), beside=cell)
        key = path.read_text(encoding="utf-8").split("output:", maxsplit=1)[0]
        if key not in self._references:
            self._references[key] = self._run(str(path), 1)
        return self._references[key]

    def _run(self, path: str, world: int) -> Trace:
        found = self.pool.run(trace, path, self.pool.device, world=world, timeout=TIMEOUT)[0]
        assert found is not None
        return found


def _words(error: UserError) -> str:
    """The problems without their place, which is in a file that the user does not know."""

    def said(problem: Problem) -> str:
        return f"{problem.message}; {problem.suggestion}" if problem.suggestion else problem.message

    return " ".join(". ".join(said(problem) for problem in error.problems).split())


def _cause(error: RankFailed) -> str:
    """What an error of a pipeline's stage followed from: the schedule's own words only say which stage."""
    first, *following = "".join(getattr(error, "__notes__", ())).split("\nThe above exception was the direct cause")
    return f" ({first.strip().splitlines()[-1]})" if following else ""
