"""What came of verifying a layout."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from stoker.job.layout import Layout
from stoker.verify.difference import TraceComparison
from stoker.verify.layout_cases import Cell


@dataclass(frozen=True)
class Check:
    """One thing that was looked at.

    Attributes:
        name: for people and programs.
        passed: None where it was not compared, for which ``reason`` says why.
        reason: of a failure, what differs first; empty where it passed.
    """

    name: str
    passed: bool | None
    reason: str = ""
    comparison: TraceComparison | None = None

    def as_json(self) -> dict[str, Any]:
        """The values for `--json`."""
        sizes = self.comparison.as_json() if self.comparison else {}
        return {"passed": self.passed, "reason": self.reason, **sizes}


@dataclass(frozen=True)
class Verdict:
    """What came of a layout.

    Attributes:
        layout: None where the layout is not even well-formed.
        comparison: with one process; None where it did not run.
        passed: None where the layout cannot be, for which ``reason`` says why.
        reason: of a failure, what differs first; empty where it passed.
        seconds: that it took, the run in one process included where it was the first to need it.
        checks: all that was looked at, the comparison with one process left out.
        facts: for people.
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
        """The verdict as other programs read it; differences are null where nothing was compared."""
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
