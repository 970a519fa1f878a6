"""Evaluation results of a ranking model: metrics of all rows and of slices, with their uncertainty."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from stoker.scoring.ranking_metrics import (
    GroupValues,
    auc,
    auc_parts,
    calibration,
    grouped_auc,
    log_losses,
    ndcg,
    normalised_entropy,
    probabilities,
    recall,
)

FEWEST = 2  # positive and negative rows that a slice needs for a standard error of its AUC


@dataclass(frozen=True)
class Scored:
    """Rows with the scores of a model.

    Attributes:
        labels: [rows, labels].
        logits: [rows, outputs]: of the labels, and where they are nested of the second label given the first.
        groups: group of each row; None if the log has none.
        grouped: whether each row has a group; None if all have. Group metrics ignore rows without one.
        probabilities: whether the sigmoid of a logit is a probability. Metrics of probabilities are left out otherwise.
        slices: value of each row, by column.
    """

    labels: np.ndarray
    logits: np.ndarray
    groups: np.ndarray | None = None
    slices: Mapping[str, np.ndarray] = field(default_factory=dict)
    grouped: np.ndarray | None = None
    probabilities: bool = True

    def __len__(self) -> int:
        return len(self.labels)

    def output(self, number: int) -> Scored:
        """Returns one output as the only label. The rows of a label given another are those where that is positive."""
        labels = self.labels.shape[1]
        rows = self if number < labels else self.some(self.labels[:, 0] > 0)
        return replace(rows, labels=rows.labels[:, [min(number, labels - 1)]], logits=rows.logits[:, [number]])

    def some(self, chosen: np.ndarray) -> Scored:
        """Returns the rows selected by a mask or by indices, without slices."""
        groups = None if self.groups is None else self.groups[chosen]
        grouped = None if self.grouped is None else self.grouped[chosen]
        return Scored(self.labels[chosen], self.logits[chosen], groups, {}, grouped, self.probabilities)


@dataclass(frozen=True)
class RankingFigure:
    """A metric and its standard error. No metric is below 0.

    Attributes:
        standard_error: None if it cannot be estimated.
        largest: the largest possible value.
    """

    value: float
    standard_error: float | None = None
    largest: float = math.inf

    def as_json(self) -> dict[str, float | None]:
        """Returns value, standard error and the 95 % normal confidence interval, within the metric's range."""
        found: dict[str, float | None] = {"value": self.value, "standard_error": self.standard_error}
        if self.standard_error is not None:
            half = 1.96 * self.standard_error
            found |= {"low": max(0.0, self.value - half), "high": min(self.largest, self.value + half)}
        return found


Slices = Mapping[str, Mapping[str, Mapping[str, RankingFigure]]]
"""Metrics by column and value."""


@dataclass(frozen=True)
class RankingFigures:
    """Results of an evaluation.

    Attributes:
        labels: metrics by output; see `Features.outputs`.
        slices: metrics by output, column and value.
        rows, rows_dropped: numbers of scored rows and of unusable ones.
        further: other facts of the evaluation, such as the step.
        averaged: number of the first outputs that `means` are over, those with a label of their own; None for all.
    """

    labels: Mapping[str, Mapping[str, RankingFigure]]
    slices: Mapping[str, Slices]
    rows: int
    rows_dropped: int = 0
    further: Mapping[str, Any] = field(default_factory=dict)
    averaged: int | None = None

    @property
    def means(self) -> dict[str, float]:
        """Mean of each metric over the labels that have it."""
        found: dict[str, list[float]] = {}
        for figures in list(self.labels.values())[: self.averaged]:
            for name, figure in figures.items():
                found.setdefault(name, []).append(figure.value)
        return {name: float(np.mean(values)) for name, values in found.items()}

    def as_json(self) -> dict[str, Any]:
        """Returns the values for ``--json``: metrics as means over the labels, and by label and slice with intervals.

        ``slices`` are those of the first label; with several labels, ``slices_by_label`` has all of them.
        """
        means = self.means
        always: dict[str, float | None] = dict.fromkeys(("auc", "log_loss", "calibration", "normalised_entropy"))

        def each(figures: Mapping[str, RankingFigure]) -> dict[str, Any]:
            return {name: figure.as_json() for name, figure in figures.items()}

        slices = {
            label: {c: {v: each(found) for v, found in values.items()} for c, values in columns.items()}
            for label, columns in self.slices.items()
        }
        return {
            **always,
            **means,
            "loss": means.get("log_loss"),
            "labels": {name: each(figures) for name, figures in self.labels.items()},
            "slices": next(iter(slices.values()), {}),
            **({"slices_by_label": slices} if len(slices) > 1 else {}),
            "rows_used": self.rows,
            "rows_dropped": self.rows_dropped,
            **self.further,
        }


def share_of(value: float, standard_error: float | None = None) -> RankingFigure:
    """Returns a metric between 0 and 1."""
    return RankingFigure(value, standard_error, largest=1.0)


def figures_of(scored: Scored, names: Sequence[str], at: Sequence[int]) -> RankingFigures:
    """Computes the metrics of scored rows.

    Args:
        names: names of the outputs.
        at: sizes k of NDCG and recall, if there are groups.
    """
    labels = {name: _figures(scored.output(number), at) for number, name in enumerate(names)}
    slices: dict[str, dict[str, dict[str, dict[str, RankingFigure]]]] = {name: {} for name in names}
    for column, values in scored.slices.items():
        parts = {str(value): scored.some(values == value) for value in np.unique(values)}
        for number, name in enumerate(names):
            slices[name][column] = {value: _figures(part.output(number), at) for value, part in parts.items()}
    return RankingFigures(labels, slices, len(scored), averaged=scored.labels.shape[1])


def _figures(scored: Scored, at: Sequence[int]) -> dict[str, RankingFigure]:
    """Returns the metrics of rows with one label; none without rows."""
    if not len(scored):
        return {}
    labels, logits = scored.labels[:, 0], scored.logits[:, 0]
    found: dict[str, RankingFigure | None] = {"auc": _auc(labels, logits)}
    if scored.probabilities:
        losses = log_losses(labels, logits)
        found["log_loss"] = RankingFigure(float(losses.mean()), _standard_error(losses))
        found["normalised_entropy"] = _normalised_entropy(labels, losses, normalised_entropy(labels, logits))
        found["calibration"] = _calibration(labels, logits)
    found["positive_rate"] = share_of(float((labels > 0).mean()), _standard_error((labels > 0).astype(float)))
    if scored.groups is not None:
        there = np.ones(len(scored), dtype=bool) if scored.grouped is None else scored.grouped
        labels, logits, groups = labels[there], logits[there], scored.groups[there]
        found["grouped_auc"] = _over_groups(grouped_auc(labels, logits, groups), by_rows=True)
        for k in at:
            found[f"ndcg@{k}"] = _over_groups(ndcg(labels, logits, groups, k), by_rows=False)
            found[f"recall@{k}"] = _over_groups(recall(labels, logits, groups, k), by_rows=False)
    return {name: figure for name, figure in found.items() if figure is not None}


def _normalised_entropy(labels: np.ndarray, losses: np.ndarray, value: float | None) -> RankingFigure | None:
    """Mean loss over the entropy H of the positive rate p, whose slope is log((1 - p) / p); its error by the delta
    method.
    """
    if value is None:
        return None
    rate = float((labels > 0).mean())
    slope = math.log((1 - rate) / rate)
    entropy = float(losses.mean()) / value
    error = _standard_error(losses - value * slope * (labels > 0))
    return RankingFigure(value, None if error is None else error / entropy)


def _auc(labels: np.ndarray, logits: np.ndarray) -> RankingFigure | None:
    value = auc(labels, logits)
    if value is None:
        return None
    parts = auc_parts(labels, logits)
    if min(map(len, parts)) < FEWEST:
        return share_of(value)
    return share_of(value, math.sqrt(sum(float(part.var(ddof=1)) / len(part) for part in parts)))


def _calibration(labels: np.ndarray, logits: np.ndarray) -> RankingFigure | None:
    """Ratio of two sums over rows; its error is that of ``predicted - ratio x label`` (the delta method)."""
    value = calibration(labels, logits)
    if value is None:
        return None
    residuals = probabilities(logits) - value * (labels > 0)
    error = _standard_error(residuals)
    return RankingFigure(value, None if error is None else error / float((labels > 0).mean()))


def _over_groups(found: GroupValues, *, by_rows: bool) -> RankingFigure | None:
    value = found.mean(by_rows=by_rows)
    if value is None:
        return None
    count = len(found.values)
    if count < FEWEST:
        return share_of(value)
    weights = found.weights if by_rows else np.ones(count)
    squares = float((weights**2 * (found.values - value) ** 2).sum()) * count / (count - 1)
    return share_of(value, math.sqrt(squares) / float(weights.sum()))


def _standard_error(values: np.ndarray) -> float | None:
    return float(values.std(ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else None
