"""Ranking metrics of scores: AUC, over all rows and within groups, log loss, calibration, NDCG and recall at k.

Labels are 0 and 1, scores are logits; higher means more likely. ``weights`` are those of the rows, a row of weight 2
counting as two; by default all are 1. NDCG and recall have none: a position in a list is one row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class GroupValues:
    """A metric of each group for which it is defined.

    Attributes:
        values: shape (groups,).
        weights: number of rows of each group, or the sum of their weights.
    """

    values: np.ndarray
    weights: np.ndarray

    def mean(self, *, by_rows: bool) -> float | None:
        """Returns the mean over groups, weighted by rows or equally; None without any."""
        if not len(self.values):
            return None
        return float(np.average(self.values, weights=self.weights if by_rows else None))


def auc(labels: np.ndarray, scores: np.ndarray, weights: np.ndarray | None = None) -> float | None:
    """Returns the share of ordered (positive, negative) pairs, a tie counting half; None with one class only.

    The weight of a pair is the product of those of its rows.
    """
    positive, weights = labels > 0, weights_of(labels, weights)
    many, few = weights[positive].sum(), weights[~positive].sum()
    if not many or not few:
        return None
    return float((weights * mass_below(scores, weights * ~positive))[positive].sum() / many / few)


def auc_parts(
    labels: np.ndarray, scores: np.ndarray, weights: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Returns, for each positive row, the share of negatives below it, and for each negative the share of positives
    above.

    The mean of either is the AUC, and the variance of the AUC is that of the two means (DeLong et al., 1988).
    """
    positive, weights = labels > 0, weights_of(labels, weights)
    many, few = (weights[rows].sum() or 1.0 for rows in (positive, ~positive))
    of_positives = mass_below(scores, weights * ~positive)[positive] / few
    return of_positives, 1 - mass_below(scores, weights * positive)[~positive] / many


def weights_of(labels: np.ndarray, weights: np.ndarray | None) -> np.ndarray:
    """Returns the weights of rows in float64, ones by default."""
    return np.ones(len(labels)) if weights is None else weights.astype(np.float64)


def mass_below(scores: np.ndarray, mass: np.ndarray) -> np.ndarray:
    """Returns, for each row, the mass of all rows with a lower score, and half of that of rows with the same score."""
    _, inverse = np.unique(scores, return_inverse=True)
    of_score = np.bincount(inverse, weights=mass)
    return (np.cumsum(of_score) - of_score / 2)[inverse]


def grouped_auc(
    labels: np.ndarray, scores: np.ndarray, groups: np.ndarray, weights: np.ndarray | None = None
) -> GroupValues:
    """Returns the AUC within each group with both classes, and its rows or their weight (GAUC: Zhou et al., 2018,
    equation 4 of DIN).
    """
    _, numbers = np.unique(groups, return_inverse=True)
    order = np.lexsort((scores, numbers))
    group, score, positive = numbers[order], scores[order], labels[order] > 0
    weight = weights_of(labels, weights)[order]
    new_run = np.ones(len(order), dtype=bool)
    new_run[1:] = (group[1:] != group[:-1]) | (score[1:] != score[:-1])
    run, negative = np.cumsum(new_run) - 1, weight * ~positive
    of_run = np.bincount(run, weights=negative)
    total, many, few = (np.bincount(group, weights=mass) for mass in (weight, weight * positive, negative))
    below = (np.cumsum(of_run) - of_run / 2)[run] - (np.cumsum(few) - few)[group]  # negatives of the group
    both = (many > 0) & (few > 0)
    sums = np.bincount(group, weights=below * weight * positive)[both]
    return GroupValues(sums / many[both] / few[both], total[both])


def log_losses(labels: np.ndarray, logits: np.ndarray) -> np.ndarray:
    """Returns the cross entropy of each row, in nats."""
    wide = logits.astype(np.float64)
    return np.maximum(wide, 0) - wide * (labels > 0) + np.log1p(np.exp(-np.abs(wide)))


def probabilities(logits: np.ndarray) -> np.ndarray:
    """Applies the logistic function."""
    wide = logits.astype(np.float64)
    small = np.exp(-np.abs(wide))
    return np.where(wide >= 0, 1 / (1 + small), small / (1 + small))


def positive_rate(labels: np.ndarray, weights: np.ndarray | None = None) -> float:
    """Returns the share of positive rows; 0 without rows."""
    total = weights_of(labels, weights).sum()
    return float((weights_of(labels, weights) * (labels > 0)).sum() / total) if total else 0.0


def normalised_entropy(labels: np.ndarray, logits: np.ndarray, weights: np.ndarray | None = None) -> float | None:
    """Returns the log loss over the entropy of the rows' positive rate (He et al., 2014, section 3); None with one
    class only.
    """
    rate = positive_rate(labels, weights)
    if rate in (0.0, 1.0):
        return None
    entropy = -rate * math.log(rate) - (1 - rate) * math.log(1 - rate)
    return float(np.average(log_losses(labels, logits), weights=weights)) / entropy


def calibration(labels: np.ndarray, logits: np.ndarray, weights: np.ndarray | None = None) -> float | None:
    """Returns predicted over actual positives: 1 is calibrated, above 1 too many; None without positives."""
    weights = weights_of(labels, weights)
    there = float(weights[labels > 0].sum())
    return float((weights * probabilities(logits)).sum()) / there if there else None


def ndcg(labels: np.ndarray, scores: np.ndarray, groups: np.ndarray, k: int) -> GroupValues:
    """Returns NDCG at k of each group with a positive row (Jarvelin and Kekalainen, 2002), with gains 0 and 1.

    Rows of equal score keep the given order.
    """
    group, rank, positive = _ranked(labels, scores, groups)
    gains = np.where(rank < k, positive / np.log2(rank + 2), 0.0)
    found = np.bincount(group, weights=gains)
    there = np.bincount(group, weights=positive).astype(int)
    ideal = np.concatenate([[0.0], np.cumsum(1 / np.log2(np.arange(max(1, k)) + 2))])
    some = there > 0
    return GroupValues(found[some] / ideal[np.minimum(there[some], k)], np.bincount(group)[some].astype(float))


def recall(labels: np.ndarray, scores: np.ndarray, groups: np.ndarray, k: int) -> GroupValues:
    """Returns the share of each group's positive rows among its first k."""
    group, rank, positive = _ranked(labels, scores, groups)
    there = np.bincount(group, weights=positive)
    some = there > 0
    found = np.bincount(group, weights=positive * (rank < k))
    return GroupValues(found[some] / there[some], np.bincount(group)[some].astype(float))


def _ranked(labels: np.ndarray, scores: np.ndarray, groups: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns each row's group, its rank within it (from 0), and whether it is positive."""
    _, numbers = np.unique(groups, return_inverse=True)
    order = np.lexsort((-scores, numbers))
    group = numbers[order]
    rows = np.bincount(group)
    rank = np.arange(len(group)) - (np.cumsum(rows) - rows)[group]
    return group, rank, (labels[order] > 0).astype(float)
