"""Ranking metrics of scores: AUC, over all rows and within groups, log loss, calibration, NDCG and recall at k.

Labels are 0 and 1, scores are logits; higher means more likely. All rows have equal weight, whatever their weight in
training.
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
        weights: number of rows of each group.
    """

    values: np.ndarray
    weights: np.ndarray

    def mean(self, *, by_rows: bool) -> float | None:
        """Returns the mean over groups, weighted by rows or equally; None without any."""
        if not len(self.values):
            return None
        return float(np.average(self.values, weights=self.weights if by_rows else None))


def auc(labels: np.ndarray, scores: np.ndarray) -> float | None:
    """Returns the share of ordered (positive, negative) pairs, a tie counting half; None with one class only."""
    positive = labels > 0
    many, few = int(positive.sum()), int((~positive).sum())
    if not many or not few:
        return None
    return float((midranks(scores)[positive].sum() - many * (many + 1) / 2) / many / few)


def auc_parts(labels: np.ndarray, scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns, for each positive row, the share of negatives below it, and for each negative the share of positives
    above.

    The mean of either is the AUC, and the variance of the AUC is that of the two means (DeLong et al., 1988; with
    midranks by Sun and Xu, 2014).
    """
    positive = labels > 0
    ranks = midranks(scores)
    many, few = int(positive.sum()), int((~positive).sum())
    of_positives = (ranks[positive] - midranks(scores[positive])) / max(1, few)
    of_negatives = 1 - (ranks[~positive] - midranks(scores[~positive])) / max(1, many)
    return of_positives, of_negatives


def midranks(scores: np.ndarray) -> np.ndarray:
    """Returns ranks from 1 on; equal scores get their mean rank."""
    _, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[inverse]


def grouped_auc(labels: np.ndarray, scores: np.ndarray, groups: np.ndarray) -> GroupValues:
    """Returns the AUC within each group with both classes, and its rows (GAUC: Zhou et al., 2018, equation 4 of
    DIN).
    """
    _, numbers = np.unique(groups, return_inverse=True)
    order = np.lexsort((scores, numbers))
    group, score, positive = numbers[order], scores[order], labels[order] > 0
    new_run = np.ones(len(order), dtype=bool)
    new_run[1:] = (group[1:] != group[:-1]) | (score[1:] != score[:-1])
    run = np.cumsum(new_run) - 1
    sizes = np.bincount(run)
    middle = np.cumsum(sizes) - (sizes - 1) / 2  # ranks within all rows, in this order
    rows = np.bincount(group)
    ranks = middle[run] - (np.cumsum(rows) - rows)[group]
    many = np.bincount(group, weights=positive)
    few = rows - many
    both = (many > 0) & (few > 0)
    sums = np.bincount(group, weights=ranks * positive)[both]
    many, few = many[both], few[both]
    return GroupValues((sums - many * (many + 1) / 2) / many / few, rows[both].astype(float))


def log_losses(labels: np.ndarray, logits: np.ndarray) -> np.ndarray:
    """Returns the cross entropy of each row, in nats."""
    wide = logits.astype(np.float64)
    return np.maximum(wide, 0) - wide * (labels > 0) + np.log1p(np.exp(-np.abs(wide)))


def probabilities(logits: np.ndarray) -> np.ndarray:
    """Applies the logistic function."""
    wide = logits.astype(np.float64)
    small = np.exp(-np.abs(wide))
    return np.where(wide >= 0, 1 / (1 + small), small / (1 + small))


def normalised_entropy(labels: np.ndarray, logits: np.ndarray) -> float | None:
    """Returns the log loss over the entropy of the rows' positive rate (He et al., 2014, section 3); None with one
    class only.
    """
    rate = float((labels > 0).mean()) if len(labels) else 0.0
    if rate in (0.0, 1.0):
        return None
    entropy = -rate * math.log(rate) - (1 - rate) * math.log(1 - rate)
    return float(log_losses(labels, logits).mean()) / entropy


def calibration(labels: np.ndarray, logits: np.ndarray) -> float | None:
    """Returns predicted over actual positives: 1 is calibrated, above 1 too many; None without positives."""
    there = int((labels > 0).sum())
    return float(probabilities(logits).sum()) / there if there else None


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
