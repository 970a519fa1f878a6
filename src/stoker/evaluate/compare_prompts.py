"""Comparison of prompt templates on the same rows; names the best one if the difference is significant."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import comb

from stoker.evaluate.intervals import CONFIDENCE, FEWEST, PairedDifference, paired_difference
from stoker.evaluate.scored_answers import ScoredAnswer, mean_scores


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
    """Ranks templates by a scorer; None if it scored no row.

    The intervals hold simultaneously for all pairs of templates (Bonferroni), as the same rows select the first one.
    """
    found = {name: mean_scores(scored, [scorer]).get(scorer) for name, scored in answers.items()}
    known = {name: mean.value for name, mean in found.items() if mean is not None}
    if len(known) < 2:
        return None
    order = sorted(known, key=lambda name: -known[name])
    values = {name: [a.scores[scorer].value for a in answers[name] if scorer in a.scores] for name in order}
    pairs = comb(len(order), 2)
    behind = {
        name: paired_difference(values[order[0]], values[name], seed=seed, confidence=1 - (1 - CONFIDENCE) / pairs)
        for name in order[1:]
    }
    enough = len(values[order[0]]) >= FEWEST
    ahead = enough and all(difference.low > 0 for difference in behind.values())
    return TemplateRanking(scorer, tuple(order), behind, order[0] if ahead else None)
