"""Results of verifying a layout."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from stoker.job.layout import Layout
from stoker.verify.difference import TraceComparison
from stoker.verify.layout_cases import Cell


@dataclass(frozen=True)
class Check:
    """Result of one check.

    Attributes:
        name: name for people and programs.
        passed: None if nothing was compared; ``reason`` then has the cause.
        reason: first difference of a failure; empty if it passed.
    """

    name: str
    passed: bool | None
    reason: str = ""
    comparison: TraceComparison | None = None

    def as_json(self) -> dict[str, Any]:
        """Returns the values for `--json`."""
        sizes = self.comparison.as_json() if self.comparison else {}
        return {"passed": self.passed, "reason": self.reason, **sizes}


@dataclass(frozen=True)
class Verdict:
    """Result of verifying a layout.

    Attributes:
        layout: None if the layout is malformed.
        comparison: comparison with one process; None if it did not run.
        passed: None if the layout is impossible; ``reason`` then has the cause.
        reason: first difference of a failure; empty if it passed.
        seconds: duration, including the single-process run for its first use.
        checks: all checks except the comparison with one process.
        facts: remarks for people.
    """

    cell: Cell
    layout: Layout | None
    comparison: TraceComparison | None
    passed: bool | None
    reason: str
    seconds: float
    checks: tuple[Check, ...] = ()
    facts: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Returns the verdict for JSON output; differences are null where nothing was compared."""
        nothing = dict.fromkeys(TraceComparison({}, ()).as_json())
        return {
            "name": self.cell.name,
            "layout": asdict(self.layout) if self.layout else self.cell.parallel,
            "world": self.layout.world if self.layout else None,
            **(self.comparison.as_json() if self.comparison else nothing),
            "checks": {check.name: check.as_json() for check in self.checks},
            "passed": self.passed,
            "reason": self.reason,
            "seconds": round(self.seconds, 2),
        }
