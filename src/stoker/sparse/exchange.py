"""Exchanges keys and rows with the processes that own them, by all-to-all."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from stoker.sparse.hashing import owners_of
from stoker.sparse.table_keys import Keys


@dataclass(frozen=True)
class Route:
    """The route of one lookup's keys.

    Attributes:
        sent, received: number of keys to and from each process.
    """

    sent: list[int]
    received: list[int]
    group: dist.ProcessGroup

    def rows_back(self, rows: Tensor) -> Tensor:
        """Sends back the rows of received keys [received, width]; returns those of the sent keys [sent, width]."""
        arrived = rows.new_empty(sum(self.sent), rows.shape[1])
        dist.all_to_all_single(arrived, rows.contiguous(), self.sent, self.received, group=self.group)
        return arrived

    def to_owners(self, rows: Tensor) -> Tensor:
        """Sends rows of the sent keys [sent, width]; returns those of the received keys [received, width]."""
        arrived = rows.new_empty(sum(self.received), rows.shape[1])
        dist.all_to_all_single(arrived, rows.contiguous(), self.received, self.sent, group=self.group)
        return arrived


def send_keys(
    keys: Keys, counts: np.ndarray, salts: np.ndarray, group: dist.ProcessGroup
) -> tuple[Route, np.ndarray, Keys, np.ndarray]:
    """Sends keys to their owners. A collective.

    Args:
        keys: [n], each once.
        counts: int64 [n], occurrences of each.
        salts: of the tables.

    Returns:
        the route; int64 [n], the place of each key among those that are sent; the keys and counts that this process has
        received, by sender.
    """
    world, tables = dist.get_world_size(group), len(salts)
    cells = owners_of(keys.hashes, world) * tables + keys.tables
    order = np.argsort(cells.astype(np.uint16) if world * tables < 2**16 else cells, kind="stable")
    places = np.empty(len(keys), np.int64)
    places[order] = np.arange(len(keys))
    sizes = torch.from_numpy(np.bincount(cells, minlength=world * tables).reshape(world, tables))
    theirs = torch.empty_like(sizes)
    dist.all_to_all_single(theirs, sizes, group=group)
    route = Route(sizes.sum(1).tolist(), theirs.sum(1).tolist(), group)
    pairs = torch.from_numpy(np.stack([keys.ids[order], counts[order]], axis=1))
    ids, counts = route.to_owners(pairs).numpy().T
    numbers = np.repeat(np.tile(np.arange(tables), world), theirs.reshape(-1).numpy())
    return route, places, Keys.of(np.ascontiguousarray(ids), numbers, salts), np.ascontiguousarray(counts)
