"""Rows that give no text: their number by reason, and the first ones."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from stoker.data.files.rows import Rejected
from stoker.data.templates.render_row import TEMPLATE_REFUSES

KEPT = 1000
LONGEST_KIND = 160  # characters of a reason by which rows are counted


def reason_kind(reason: str) -> str:
    """Returns the stable phrase of a reason, by which reasons are counted. A template's message belongs to it."""
    phrase, _, detail = reason.partition(":")
    return reason[:LONGEST_KIND] if phrase == TEMPLATE_REFUSES and detail else phrase


@dataclass(frozen=True)
class DroppedRows:
    """Dropped rows.

    Attributes:
        reasons: number of rows by reason.
        first: the first `KEPT` rows.
    """

    reasons: Counter[str] = field(default_factory=Counter)
    first: list[Rejected] = field(default_factory=list)

    def add(self, row: Rejected) -> None:
        """Counts a row."""
        self.reasons[reason_kind(row.reason)] += 1
        if len(self.first) < KEPT:
            self.first.append(row)

    def join(self, other: DroppedRows) -> None:
        """Adds the rows of another source."""
        self.reasons.update(other.reasons)
        self.first.extend(other.first[: KEPT - len(self.first)])
