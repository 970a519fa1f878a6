"""Prompt templates on the same rows: which one scores best, where the data can tell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from stoker.evaluate.intervals import CONFIDENCE, PairedDifference, paired_difference
from stoker.evaluate.scored_answers import ScoredAnswer, means

FEWEST = 10  # rows from which a best template is named; a resample of fewer tells little


@dataclass(frozen=True)
class TemplateRanking:
    """Templates by one scorer.

    Attributes:
        order: names, the highest mean first.
        behind: of each other template, by how much the first one is ahead.
        best: the first where it is ahead of every other beyond its interval; else None.
    """

    scorer: str
    order: tuple[str, ...]
    behind: Mapping[str, PairedDifference]
    best: str | None


def rank(answers: Mapping[str, Sequence[ScoredAnswer]], scorer: str, *, seed: int) -> TemplateRanking | None:
    """Ranks templates by a scorer; None where it scored no row.

    The intervals hold together for all pairs of templates (Bonferroni), as the first one is chosen by the same rows.
    """
    found = {name: means(scored, [scorer]).get(scorer) for name, scored in answers.items()}
    known = {name: mean.value for name, mean in found.items() if mean is not None}
    if len(known) < 2:
        return None
    order = sorted(known, key=lambda name: -known[name])
    values = {name: [a.scores[scorer].value for a in answers[name] if scorer in a.scores] for name in order}
    pairs = len(list(combinations(order, 2)))
    behind = {
        name: paired_difference(values[order[0]], values[name], seed=seed, confidence=1 - (1 - CONFIDENCE) / pairs)
        for name in order[1:]
    }
    enough = len(values[order[0]]) >= FEWEST
    ahead = enough and all(difference.low > 0 for difference in behind.values())
    return TemplateRanking(scorer, tuple(order), behind, order[0] if ahead else None)
