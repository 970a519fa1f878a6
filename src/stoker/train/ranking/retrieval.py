"""Retrieval metrics of two-tower models: all items of a log are ranked for each group, not only those shown to it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from stoker.data.ranking.click_log import RowSet
from stoker.models.ranking.model_inputs import RankingInputs
from stoker.models.ranking.two_tower import TwoTower
from stoker.train.ranking.evaluation_metrics import RankingFigure, share_of
from stoker.train.ranking.ranking_task import EVALUATION_SAMPLES, RankingBatch, RankingTask

GROUPS = 256  # ranked at a time


@dataclass(frozen=True)
class Retrieval:
    """Retrieval metrics.

    Attributes:
        figures: recall and NDCG at k; empty if no group has a positive item that it did not have before.
        items: size of the catalogue.
        by: the feature whose values are the items.
    """

    figures: Mapping[str, RankingFigure]
    items: int
    by: str


def retrieval_figures(task: RankingTask, before: RowSet, rows: RowSet, at: Sequence[int]) -> Retrieval | None:
    """Returns recall and NDCG at k over the catalogue, as means over groups with a positive row; None without groups.

    The catalogue is every item of both parts, with the features of its last row; a group has the features of its first
    row. Items that a group has in the rows before are not ranked for it and do not count.

    Args:
        before: rows of the log that come before those to evaluate.
        rows: rows to evaluate.
        at: sizes k.
    """
    model = task.model
    assert isinstance(model, TwoTower)
    if rows.features.group is None or not (grouped := rows.column("grouped")).any():
        return None
    name = task.shape.item[0]
    catalogue, item_vectors = _items(task, model, name, [before, rows])
    groups, first = np.unique(rows.column("group")[grouped], return_index=True)
    user_vectors = _vectors(task, rows, np.flatnonzero(grouped)[first], model.user_vectors)
    wanted = _pairs(rows, name, groups, catalogue, rows.labels[:, 0] > 0)
    seen = _pairs(before, name, groups, catalogue, np.ones(len(before), dtype=bool))
    found: dict[str, list[np.ndarray]] = {}
    for start in range(0, len(groups), GROUPS):
        scores = user_vectors[start : start + GROUPS] @ item_vectors.T
        positive = np.zeros(scores.shape, dtype=bool)
        for pairs, value in ((wanted, True), (seen, False)):
            mine = pairs[(pairs[:, 0] >= start) & (pairs[:, 0] < start + len(scores))]
            positive[mine[:, 0] - start, mine[:, 1]] = value
            if not value:
                scores[mine[:, 0] - start, mine[:, 1]] = -np.inf
        for k in at:
            for metric, values in _at(scores, positive, k):
                found.setdefault(f"retrieval_{metric}@{k}", []).append(values)
    means = {metric: _mean(np.concatenate(parts)) for metric, parts in found.items()}
    return Retrieval({metric: mean for metric, mean in means.items() if mean is not None}, len(catalogue), name)


def _at(scores: np.ndarray, positive: np.ndarray, k: int) -> Iterator[tuple[str, np.ndarray]]:
    """Yields recall and NDCG of each group with a positive item."""
    some = positive.any(1)
    scores, positive = scores[some], positive[some]
    best = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    hits = np.take_along_axis(positive, best, axis=1)
    there = positive.sum(1)
    discounts = 1 / np.log2(np.arange(hits.shape[1]) + 2)
    ideal = np.concatenate([[0.0], np.cumsum(discounts)])
    yield "recall", hits.sum(1) / there
    yield "ndcg", (hits * discounts).sum(1) / ideal[np.minimum(there, hits.shape[1])]


def _mean(values: np.ndarray) -> RankingFigure | None:
    if not len(values):
        return None
    error = float(values.std(ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else None
    return share_of(float(values.mean()), error)


def _items(task: RankingTask, model: TwoTower, name: str, parts: Sequence[RowSet]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the ids of the catalogue, ascending, and their vectors, from each item's last row."""
    vectors: dict[int, np.ndarray] = {}
    for rows in parts:
        ids, there = rows.first_ids(name)
        places = np.flatnonzero(there)
        different, last = np.unique(ids[places][::-1], return_index=True)
        found = _vectors(task, rows, places[::-1][last], model.item_vectors)
        vectors |= dict(zip(different.tolist(), found, strict=True))
    catalogue = np.array(sorted(vectors), dtype=np.int64)
    return catalogue, np.stack([vectors[item] for item in catalogue.tolist()])


@torch.no_grad()
def _vectors(
    task: RankingTask, rows: RowSet, positions: np.ndarray, of: Callable[[RankingInputs], torch.Tensor]
) -> np.ndarray:
    task.tables.eval()
    found = []
    for start in range(0, len(positions), EVALUATION_SAMPLES):
        batch = task.part_of(rows, positions[start : start + EVALUATION_SAMPLES]).to(task.device).inputs
        assert isinstance(batch, RankingBatch)
        found.append(of(task.inputs_of(batch)).double().cpu().numpy())
    task.tables.train()
    return np.concatenate(found) if found else np.zeros((0, task.shape.width))


def _pairs(rows: RowSet, name: str, groups: np.ndarray, catalogue: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """Returns (group index, item index) of the chosen rows in evaluated groups; [n, 2]."""
    ids, there = rows.first_ids(name)
    group = rows.column("group")
    place = np.searchsorted(groups, group).clip(max=len(groups) - 1)
    mine = chosen & there & rows.column("grouped") & (groups[place] == group)
    return np.stack([place[mine], np.searchsorted(catalogue, ids[mine])], axis=1)
