"""Rows of a click log as tensors, and the inputs of a ranking model after its ids are looked up."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from stoker.data.ranking.log_batch import RowBatch
from stoker.models.ranking.model_inputs import FIRST_ORDER, RankingInputs, RankingShape
from stoker.sparse.jagged_ids import JaggedIds


@dataclass(frozen=True)
class RankingBatch:
    """Rows on a device; the ids stay on the host, where the tables are.

    Attributes:
        labels: [B, T].
        weights: [B].
        dense: [B, N].
        ids: ids by feature, as `stoker.sparse.jagged_ids`.
        positions: [B], position of each row in its source.
    """

    labels: Tensor
    weights: Tensor
    dense: Tensor
    ids: Mapping[str, JaggedIds]
    positions: Tensor


def ranking_batch_of(batch: RowBatch, positions: np.ndarray, dtype: torch.dtype) -> RankingBatch:
    """Converts rows to tensors.

    Args:
        dtype: dtype of numbers, labels and weights.
    """
    ids = {
        name: JaggedIds(
            torch.from_numpy(found.ids),
            torch.from_numpy(found.lengths),
            None if found.weights is None else torch.from_numpy(found.weights).to(dtype),
        )
        for name, found in batch.ids.items()
    }
    return RankingBatch(
        torch.from_numpy(batch.labels).to(dtype),
        torch.from_numpy(batch.weights).to(dtype),
        torch.from_numpy(batch.dense).to(dtype),
        MappingProxyType(ids),
        torch.from_numpy(positions),
    )


def ranking_inputs(
    batch: RankingBatch,
    look_up: Callable[[Mapping[str, JaggedIds]], Mapping[str, Tensor]],
    shape: RankingShape,
    *,
    first_order: bool,
    device: torch.device,
) -> RankingInputs:
    """Returns the model's inputs for a batch.

    Args:
        look_up: returns the vectors of each feature; a collective where the tables are in a process group.
        first_order: whether each feature is also looked up in a table of single weights.
    """
    ids = ids_looked_up(batch, shape, first_order=first_order)
    vectors = look_up(ids)
    lengths = {name: ids[name].lengths.clamp(max=vectors[name].shape[1]).to(device) for name in shape.sequences}
    return RankingInputs(vectors, lengths, batch.dense)


def ids_looked_up(batch: RankingBatch, shape: RankingShape, *, first_order: bool) -> dict[str, JaggedIds]:
    """Returns the ids of each feature of the tables; ``first_order`` as for `ranking_inputs`."""
    ids = dict(batch.ids)
    if first_order:
        ids |= {name + FIRST_ORDER: found for name, found in batch.ids.items() if name not in shape.sequences}
    return ids
