"""The run in one process that layouts are compared with, and the clipping that binds in some of its steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from stoker.verify.verdict import Check
from stoker.verify.verify_run import Trace

SMALLEST = 1e-12  # gradient norm that a limit can lie above


@dataclass(frozen=True)
class ReferenceRun:
    """What one process computed.

    Attributes:
        path: of its job file.
        clip: largest gradient norm: some steps are above it and some below.
        seconds: that it took.
        checks: of the run itself, as far as they have been made.
    """

    trace: Trace
    path: Path
    clip: float
    seconds: float
    checks: dict[str, Check] = field(default_factory=dict)


def between(norms: tuple[float, ...]) -> float:
    """A limit that some of the norms are above and some below: in the middle of the widest gap."""
    ordered = sorted(max(norm, SMALLEST) for norm in norms)
    if len(ordered) < 2:
        return ordered[0] / 2
    low, high = max(pairwise(ordered), key=lambda pair: pair[1] / pair[0])
    return float((low * high) ** 0.5)
