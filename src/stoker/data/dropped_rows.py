"""Rows that give no text, as they are met: their number by reason, and the first of them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from stoker.data.files.rows import Rejected
from stoker.data.token_cache import reason_kind

KEPT = 1000


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
