"""Softmax over the items of a step (Yi et al., 2019, equations 3 to 5), over all processes.

Shapes: B rows of this process, C candidates, D width.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy, pad

from stoker.models.ranking.two_tower import TwoTower
from stoker.parallel.collectives import all_gather, gather_parts
from stoker.sparse.hashing import hashes_of, salt_of
from stoker.train.ranking.ranking_batch import RankingBatch

_SALT = salt_of("item frequencies")


class InBatchSoftmax:
    """The loss of the positive rows: the cross entropy of their item among the items of all rows of the step.

    The logarithm of the probability that an item is in a batch is subtracted from its logit (logQ correction), if the
    tower estimates it. Other rows with the item of a positive row are not candidates for it.

    Args:
        item: feature of the item's id.
        batch: rows of a step, of all processes.
        group: processes whose items are candidates together; None for this process alone.
    """

    def __init__(self, tower: TwoTower, item: str, *, batch: int, group: dist.ProcessGroup | None) -> None:
        self._tower, self._item, self.batch, self._group = tower, item, batch, group

    def __call__(self, users_BD: Tensor, items_BD: Tensor, batch: RankingBatch) -> Tensor:
        """Returns the summed loss of this process' rows.

        In training it is a collective, and counts the items. In evaluation the candidates are this process' rows.

        Args:
            users_BD: vectors of the users over the temperature.
            items_BD: vectors of the items.
        """
        frequencies, first = self._tower.frequencies, 0
        own_B3 = keys_C3 = self._keys(batch).to(items_BD.device)
        items_CD = items_BD
        if self._tower.training and self._group is not None:
            rows = self.batch // dist.get_world_size(self._group)  # of a process; the last step may have fewer
            first, missing = dist.get_rank(self._group) * rows, (0, 0, 0, rows - len(items_BD))
            items_CD = gather_parts(pad(items_BD, missing), 0, self._group)
            keys_C3 = all_gather(pad(own_B3, missing), 0, self._group)
        ids_C, there_C, cells_C = keys_C3.unbind(1)
        if self._tower.training and frequencies is not None:
            frequencies.update(cells_C.where(there_C > 0, frequencies.cells))
        own_B = first + torch.arange(len(users_BD), device=items_CD.device)
        excluded_BC = (own_B3[:, :1] == ids_C) | (there_C == 0)
        excluded_BC[torch.arange(len(own_B)), own_B] = False
        with torch.autocast(items_CD.device.type, enabled=False):
            logits_BC = users_BD @ items_CD.T
            if frequencies is not None:
                logits_BC = logits_BC - frequencies.log_probabilities(cells_C)
            losses_B = cross_entropy(logits_BC.masked_fill(excluded_BC, -torch.inf), own_B, reduction="none")
        return (losses_B * batch.labels[:, 0] * batch.weights * own_B3[:, 1]).sum()

    def _keys(self, batch: RankingBatch) -> Tensor:
        """Returns the item's id of each row, whether it has one, and its cell; int64 [B, 3]."""
        found, frequencies = batch.ids[self._item], self._tower.frequencies
        there = found.lengths > 0
        keys_B3 = torch.zeros(len(there), 3, dtype=torch.int64)
        keys_B3[there, 0], keys_B3[:, 1] = found.ids, there.long()
        if frequencies is not None:
            cells = hashes_of(found.ids.numpy(), _SALT) % frequencies.cells
            keys_B3[there, 2] = torch.from_numpy(cells.astype("int64"))
        return keys_B3
