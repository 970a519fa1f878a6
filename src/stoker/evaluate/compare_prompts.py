"""Comparison of prompt templates on the same rows; names the best one if the difference is significant."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import comb

from stoker.evaluate.intervals import CONFIDENCE, FEWEST, PairedDifference, paired_difference
from stoker.evaluate.scored_answers import ScoredAnswer


@dataclass(frozen=True)
class TemplateRanking:
    """Templates ranked by one scorer.

    Attributes:
        order: names, in descending order of the mean.
        behind: lead of the first template over each other one.
        best: the first template if it leads every other significantly; else None.
    """

    scorer: str
    order: tuple[str, ...]
    behind: Mapping[str, PairedDifference]
    best: str | None


def rank(answers: Mapping[str, Sequence[ScoredAnswer]], scorer: str, *, seed: int) -> TemplateRanking | None:
    """Ranks templates by a scorer, on the rows that it scored under all of them; None without any.

    The intervals hold simultaneously for all pairs of templates (Bonferroni), as the same rows select the first one.
    """
    scored = {name: each for name, each in answers.items() if any(a.value(scorer) is not None for a in each)}
    # A judge may be clear about a row under one template only.
    rows = [
        n for n, each in enumerate(zip(*scored.values(), strict=True)) if all(a.value(scorer) is not None for a in each)
    ]
    if len(scored) < 2 or not rows:
        return None
    values = {name: [each[n].scores[scorer].value for n in rows] for name, each in scored.items()}
    order = sorted(values, key=lambda name: -sum(values[name]))
    pairs = comb(len(order), 2)
    behind = {
        name: paired_difference(values[order[0]], values[name], seed=seed, confidence=1 - (1 - CONFIDENCE) / pairs)
        for name in order[1:]
    }
    enough = len(rows) >= FEWEST
    ahead = enough and all(difference.low > 0 for difference in behind.values())
    return TemplateRanking(scorer, tuple(order), behind, order[0] if ahead else None)
