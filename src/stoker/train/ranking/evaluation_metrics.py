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
    positive_rate,
    probabilities,
    recall,
    weights_of,
)

FEWEST = 2  # values, or rows of each class, that a standard error needs


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
        weights: of the rows, in all metrics but those of lists; None if all are 1.
    """

    labels: np.ndarray
    logits: np.ndarray
    groups: np.ndarray | None = None
    slices: Mapping[str, np.ndarray] = field(default_factory=dict)
    grouped: np.ndarray | None = None
    probabilities: bool = True
    weights: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def output(self, number: int) -> Scored:
        """Returns one output as the only label. The rows of a label given another are those where that is positive."""
        labels = self.labels.shape[1]
        rows = self if number < labels else self.some(self.labels[:, 0] > 0)
        return replace(rows, labels=rows.labels[:, [min(number, labels - 1)]], logits=rows.logits[:, [number]])

    def some(self, chosen: np.ndarray) -> Scored:
        """Returns the rows selected by a mask or by indices, without slices."""
        groups, grouped, weights = (
            None if values is None else values[chosen] for values in (self.groups, self.grouped, self.weights)
        )
        return Scored(self.labels[chosen], self.logits[chosen], groups, {}, grouped, self.probabilities, weights)


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
    """Returns the metrics of rows with one label; none without rows, or if all have the weight 0."""
    if not len(scored) or (scored.weights is not None and not scored.weights.any()):
        return {}
    labels, logits, weights = scored.labels[:, 0], scored.logits[:, 0], scored.weights
    found: dict[str, RankingFigure | None] = {"auc": _auc(labels, logits, weights)}
    if scored.probabilities:
        losses = log_losses(labels, logits)
        mean = float(np.average(losses, weights=weights))
        found["log_loss"] = RankingFigure(mean, _standard_error(losses, weights))
        found["normalised_entropy"] = _normalised_entropy(labels, logits, weights)
        found["calibration"] = _calibration(labels, logits, weights)
    positive = (labels > 0).astype(float)
    found["positive_rate"] = share_of(positive_rate(labels, weights), _standard_error(positive, weights))
    if scored.groups is not None:
        own = scored if scored.grouped is None else scored.some(scored.grouped)
        assert own.groups is not None
        labels, logits, groups = own.labels[:, 0], own.logits[:, 0], own.groups
        found["grouped_auc"] = _over_groups(grouped_auc(labels, logits, groups, own.weights), by_rows=True)
        for k in at:
            found[f"ndcg@{k}"] = _over_groups(ndcg(labels, logits, groups, k), by_rows=False)
            found[f"recall@{k}"] = _over_groups(recall(labels, logits, groups, k), by_rows=False)
    return {name: figure for name, figure in found.items() if figure is not None}


def _normalised_entropy(labels: np.ndarray, logits: np.ndarray, weights: np.ndarray | None) -> RankingFigure | None:
    """Mean loss over the entropy H of the positive rate p, whose slope is log((1 - p) / p); its error by the delta
    method.
    """
    value = normalised_entropy(labels, logits, weights)
    if value is None:
        return None
    losses, rate = log_losses(labels, logits), positive_rate(labels, weights)
    slope = math.log((1 - rate) / rate)
    entropy = float(np.average(losses, weights=weights)) / value
    error = _standard_error(losses - value * slope * (labels > 0), weights)
    return RankingFigure(value, None if error is None else error / entropy)


def _auc(labels: np.ndarray, logits: np.ndarray, weights: np.ndarray | None) -> RankingFigure | None:
    value = auc(labels, logits, weights)
    if value is None:
        return None
    parts, all_weights = auc_parts(labels, logits, weights), weights_of(labels, weights)
    if min(map(len, parts)) < FEWEST:
        return share_of(value)
    errors = map(_standard_error, parts, (all_weights[labels > 0], all_weights[labels <= 0]))
    return share_of(value, math.hypot(*(error or 0.0 for error in errors)))


def _calibration(labels: np.ndarray, logits: np.ndarray, weights: np.ndarray | None) -> RankingFigure | None:
    """Ratio of two sums over rows; its error is that of ``predicted - ratio x label`` (the delta method)."""
    value = calibration(labels, logits, weights)
    if value is None:
        return None
    error = _standard_error(probabilities(logits) - value * (labels > 0), weights)
    return RankingFigure(value, None if error is None else error / positive_rate(labels, weights))


def _over_groups(found: GroupValues, *, by_rows: bool) -> RankingFigure | None:
    value = found.mean(by_rows=by_rows)
    if value is None:
        return None
    weights = found.weights if by_rows else None
    return share_of(value, _standard_error(found.values, weights))


def _standard_error(values: np.ndarray, weights: np.ndarray | None = None) -> float | None:
    """Returns the standard error of the weighted mean of independent values, as that of a ratio of two sums."""
    count = len(values)
    if count < FEWEST:
        return None
    weights = weights_of(values, weights)
    squares = float((weights**2 * (values - np.average(values, weights=weights)) ** 2).sum()) * count / (count - 1)
    return math.sqrt(squares) / float(weights.sum())
