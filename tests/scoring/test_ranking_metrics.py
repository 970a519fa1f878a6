"""Metrics of rankings against scikit-learn and against plain definitions."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
from sklearn.metrics import log_loss, ndcg_score, roc_auc_score

from stoker.scoring.ranking_metrics import (
    auc,
    auc_parts,
    calibration,
    grouped_auc,
    log_losses,
    mass_below,
    ndcg,
    normalised_entropy,
    probabilities,
    recall,
)
from stoker.train.ranking.evaluation_metrics import Scored, figures_of


@pytest.fixture(params=["distinct", "ties"])
def rows(request: pytest.FixtureRequest) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Labels, logits, groups of 600 rows."""
    random = np.random.default_rng(3)
    logits = random.normal(size=600)
    labels = (random.random(600) < probabilities(logits - 1)).astype(np.float32)
    return labels, np.round(logits, 1) if request.param == "ties" else logits, random.integers(0, 40, 600) * 7 - 90


def test_auc_is_scikit_learns(rows: tuple[np.ndarray, ...]) -> None:
    labels, logits, _ = rows
    assert auc(labels, logits) == pytest.approx(roc_auc_score(labels, logits), abs=1e-12)
    assert auc(labels * 0, logits) is None
    assert auc(labels * 0 + 1, logits) is None


def test_the_parts_of_the_auc_count_pairs() -> None:
    labels, scores = np.array([1, 0, 1, 0, 0]), np.array([0.5, 0.5, 2.0, -1.0, 0.7])
    of_positives, of_negatives = auc_parts(labels, scores)
    above = {(i, j): (scores[i] > scores[j]) + (scores[i] == scores[j]) / 2 for i, j in product((0, 2), (1, 3, 4))}
    assert of_positives.tolist() == pytest.approx([np.mean([above[i, j] for j in (1, 3, 4)]) for i in (0, 2)])
    assert of_negatives.tolist() == pytest.approx([np.mean([above[i, j] for i in (0, 2)]) for j in (1, 3, 4)])
    assert auc(labels, scores) == pytest.approx(of_positives.mean())
    assert mass_below(scores, np.ones(5)).tolist() == [2.0, 2.0, 4.5, 0.5, 3.5]


def test_the_standard_error_of_the_auc_is_that_of_many_draws() -> None:
    random = np.random.default_rng(0)
    drawn, errors = [], []
    for _ in range(400):
        labels = (np.arange(200) < 60).astype(np.float32)
        logits = random.normal(size=200) + labels
        figure = figures_of(Scored(labels[:, None], logits[:, None]), ["y"], [1]).labels["y"]["auc"]
        drawn.append(figure.value)
        errors.append(figure.standard_error)
    assert np.mean(errors) == pytest.approx(np.std(drawn), rel=0.08)


def test_grouped_auc_is_scikit_learns_in_each_group(rows: tuple[np.ndarray, ...]) -> None:
    labels, logits, groups = rows
    labels[groups == groups[0]], labels[groups == groups.max()] = 1, 0  # groups of one class have no AUC
    found = grouped_auc(labels, logits, groups)
    expected, weights = [], []
    for group in np.unique(groups):
        own = groups == group
        if 0 < labels[own].sum() < own.sum():
            expected.append(roc_auc_score(labels[own], logits[own]))
            weights.append(own.sum())
    np.testing.assert_allclose(found.values, expected, atol=1e-12)
    assert found.mean(by_rows=True) == pytest.approx(np.average(expected, weights=weights))


def test_log_loss_is_scikit_learns_and_holds_for_large_logits(rows: tuple[np.ndarray, ...]) -> None:
    labels, logits, _ = rows
    assert log_losses(labels, logits).mean() == pytest.approx(log_loss(labels, probabilities(logits)), abs=1e-12)
    assert log_losses(np.array([0.0, 1.0]), np.array([1000.0, -800.0])).tolist() == [1000.0, 800.0]


def test_normalised_entropy_is_one_for_the_mean_and_calibration_too() -> None:
    labels = np.array([1.0, 0.0, 0.0, 0.0])
    logits = np.full(4, math.log(0.25 / 0.75))
    assert normalised_entropy(labels, logits) == pytest.approx(1.0)
    assert calibration(labels, logits) == pytest.approx(1.0)
    assert calibration(labels, logits + 100) == pytest.approx(4.0)
    assert normalised_entropy(labels * 0, logits) is None
    assert normalised_entropy(labels * 0 + 1, logits) is None
    assert calibration(labels * 0, logits) is None


@pytest.mark.parametrize("k", [1, 3, 10, 100])
def test_ndcg_and_recall_by_group(k: int) -> None:
    random = np.random.default_rng(5)
    labels, scores, groups = random.integers(0, 2, 300), random.normal(size=300), random.integers(0, 25, 300)
    gains, recalls = [], []
    for group in np.unique(groups):
        own = groups == group
        if labels[own].sum():
            gains.append(ndcg_score([labels[own]], [scores[own]], k=k))
            best = labels[own][np.argsort(-scores[own])][:k]
            recalls.append(best.sum() / labels[own].sum())
    np.testing.assert_allclose(ndcg(labels, scores, groups, k).values, gains, atol=1e-12)
    np.testing.assert_allclose(recall(labels, scores, groups, k).values, recalls, atol=1e-12)


def test_weighted_metrics_are_scikit_learns(rows: tuple[np.ndarray, ...]) -> None:
    labels, logits, groups = rows
    weights = np.random.default_rng(2).exponential(size=600) * (np.arange(600) % 9 > 0)
    found = figures_of(Scored(labels[:, None], logits[:, None], groups, weights=weights), ["y"], [5]).labels["y"]
    scores = probabilities(logits)
    assert found["auc"].value == pytest.approx(roc_auc_score(labels, scores, sample_weight=weights), abs=1e-12)
    loss = log_loss(labels, scores, sample_weight=weights)
    assert found["log_loss"].value == pytest.approx(loss, abs=1e-12)
    rate = np.average(labels, weights=weights)
    entropy = log_loss(labels, np.full(600, rate), sample_weight=weights)
    assert found["normalised_entropy"].value == pytest.approx(loss / entropy)
    assert found["calibration"].value == pytest.approx(np.average(scores, weights=weights) / rate)
    assert found["positive_rate"].value == pytest.approx(rate)
    each, sums = [], []
    for group in np.unique(groups):
        own = (groups == group) & (weights > 0)
        if 0 < labels[own].sum() < own.sum():
            each.append(roc_auc_score(labels[own], scores[own], sample_weight=weights[own]))
            sums.append(weights[own].sum())
    assert found["grouped_auc"].value == pytest.approx(np.average(each, weights=sums), abs=1e-12)
    plain = figures_of(Scored(labels[:, None], logits[:, None], groups), ["y"], [5]).labels["y"]
    assert found["ndcg@5"] == plain["ndcg@5"] and found["recall@5"] == plain["recall@5"]


def test_a_row_of_weight_two_counts_as_two() -> None:
    random = np.random.default_rng(4)
    labels, logits, weights = random.integers(0, 2, 80), random.normal(size=80).round(1), random.integers(0, 3, 80)
    one = figures_of(Scored(labels[:, None], logits[:, None], weights=weights), ["y"], [])
    twice = np.repeat(np.arange(80), weights)
    many = figures_of(Scored(labels[twice][:, None], logits[twice][:, None]), ["y"], [])
    assert one.means == pytest.approx(many.means)
    assert figures_of(Scored(labels[:, None], logits[:, None], weights=weights * 0), ["y"], []).labels == {"y": {}}


def test_the_standard_errors_of_weighted_metrics_are_those_of_many_draws() -> None:
    """As where one in five negative rows is kept, with the weight 5."""
    random = np.random.default_rng(0)
    drawn: dict[str, list[float]] = {}
    errors: dict[str, list[float]] = {}
    for _ in range(400):
        logits = random.normal(-1.5, 1.0, 900)
        labels = (random.random(900) < probabilities(logits)).astype(np.float32)
        kept = (labels > 0) | (random.random(900) < 0.2)
        weights = np.where(labels > 0, 1.0, 5.0)[kept]
        found = figures_of(Scored(labels[kept][:, None], logits[kept][:, None], weights=weights), ["y"], []).labels["y"]
        for name, figure in found.items():
            drawn.setdefault(name, []).append(figure.value)
            errors.setdefault(name, []).append(figure.standard_error or 0.0)
    for name, values in drawn.items():
        assert np.mean(errors[name]) == pytest.approx(np.std(values), rel=0.12), name
    assert np.mean(drawn["calibration"]) == pytest.approx(1.0, abs=0.01)


def test_figures_of_several_labels_and_slices() -> None:
    random = np.random.default_rng(1)
    logits = random.normal(size=(100, 2))
    labels = (random.random((100, 2)) < 0.3).astype(np.float32)
    sides = np.where(np.arange(100) < 60, "left", "right")
    found = figures_of(Scored(labels, logits, None, {"side": sides}), ["a", "b"], [5])
    assert found.as_json()["auc"] == pytest.approx(np.mean([roc_auc_score(labels[:, n], logits[:, n]) for n in (0, 1)]))
    of_a, of_b = (found.slices[label]["side"] for label in "ab")
    assert of_a["right"]["auc"].value == pytest.approx(roc_auc_score(labels[60:, 0], logits[60:, 0]))
    assert of_b["left"]["auc"].value == pytest.approx(roc_auc_score(labels[:60, 1], logits[:60, 1]))
    assert set(found.as_json()) >= {"auc", "log_loss", "calibration", "normalised_entropy", "labels", "slices", "loss"}
