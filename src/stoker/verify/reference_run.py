"""The single-process run that layouts are compared with, and a gradient clip that is active in some of its steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from stoker.verify.verdict import Check
from stoker.verify.verify_run import Trace

SMALLEST = 1e-12  # least gradient norm for a clip


@dataclass(frozen=True)
class ReferenceRun:
    """Result of the single-process run.

    Attributes:
        path: path of its job file.
        clip: gradient clip: some steps have larger norms and some smaller ones.
        seconds: duration.
        checks: checks of the run itself that have been made.
    """

    trace: Trace
    path: Path
    clip: float
    seconds: float
    checks: dict[str, Check] = field(default_factory=dict)


def widest_gap_midpoint(norms: tuple[float, ...]) -> float:
    """Returns a limit between the norms: in the middle of the widest gap."""
    ordered = sorted(max(norm, SMALLEST) for norm in norms)
    if len(ordered) < 2:
        return ordered[0] / 2
    low, high = max(pairwise(ordered), key=lambda pair: pair[1] / pair[0])
    return float((low * high) ** 0.5)
