"""The processes of a run as a grid: one axis for each kind of parallelism, one process group for each line.

Ranks count the axis ``tensor`` fastest, as its processes communicate most and should be neighbours; then ``context``,
``shard``, ``replica``, ``pipe``, and ``island``, whose processes communicate least.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cached_property
from typing import Literal, get_args

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from stoker.grouping import grouped
from stoker.job.layout import Layout

MESSAGE = 2**24  # elements that are summed in one message
GridAxis = Literal["island", "pipe", "replica", "shard", "context", "tensor"]
AXES: tuple[GridAxis, ...] = get_args(GridAxis)
Axis = Literal["island", "pipe", "data", "batch", "context", "tensor", "ends"]
_LINES: dict[Axis, tuple[GridAxis, ...]] = {
    "island": ("island",),
    "data": ("island", "replica", "shard", "context"),
    "pipe": ("pipe",),
    "batch": ("replica", "shard", "context"),
    "context": ("context",),
    "tensor": ("tensor",),
}


class Mesh:
    """This process' coordinates in a layout, and its groups.

    The default process group must be initialised, with as many processes as the layout needs.

    Attributes:
        groups: by axis; None for a single process. ``pipe``: the stages of a pipeline. ``tensor``: processes that split
            each matrix. ``context``: processes that split each row. ``batch``: processes with the same weights and
            other tokens, over which gradients are summed in every step. ``data``: the same of all islands. ``island``:
            processes with the same part of the model, one in each island. ``ends``: the first and the last stage of a
            pipeline.
    """

    def __init__(self, layout: Layout, device: torch.device) -> None:
        if dist.get_world_size() != layout.world:
            raise ValueError(f"the layout needs {layout.world} processes, and there are {dist.get_world_size()}")
        self.layout, self.device = layout, device
        self.rank = dist.get_rank()
        self._whole_rows = False
        self._grid = np.arange(layout.world).reshape(
            layout.islands,
            layout.pipeline,
            layout.replicas // layout.islands,
            layout.shard_size,
            layout.context,
            layout.tensor,
        )
        self._at = dict(zip(AXES, (int(i[0]) for i in np.nonzero(self._grid == self.rank)), strict=True))
        self.groups: dict[Axis, dist.ProcessGroup | None] = {
            axis: self._group(lines, axis) for axis, lines in _LINES.items() if axis != "data" or layout.islands > 1
        }
        self.groups.setdefault("data", self.groups["batch"])
        ends = self._grid[:, [0, -1]] if layout.pipeline > 1 else self._grid[:, :1]
        self.groups["ends"] = self._new_group(np.moveaxis(ends, 1, -1).reshape(-1, ends.shape[1]), "ends")

    def _group(self, lines: tuple[GridAxis, ...], axis: str) -> dist.ProcessGroup | None:
        along = [AXES.index(name) for name in lines]
        last = np.moveaxis(self._grid, along, range(-len(along), 0))
        size = int(np.prod([self._grid.shape[i] for i in along]))
        return self._new_group(last.reshape(-1, size), axis)

    def _new_group(self, lines: np.ndarray, axis: str) -> dist.ProcessGroup | None:
        """Returns the group of this process' line; every process creates all groups, in the same order."""
        if lines.shape[1] == 1:
            return None
        mine = None
        for ranks in lines.tolist():
            group = dist.new_group(ranks, timeout=self._timeout, group_desc=axis)
            mine = group if self.rank in ranks else mine
        return mine

    @property
    def _timeout(self) -> timedelta:
        """The default group's timeout; torch gives new groups another one."""
        timeout: timedelta = dist.distributed_c10d._get_default_group()._get_backend(self.device).options._timeout
        return timeout

    @property
    def splits_sequence(self) -> bool:
        """Returns whether tensor processes split rows between the regions of a block, in the current pass."""
        return self.layout.sequence and not self._whole_rows

    @contextmanager
    def whole_rows(self) -> Iterator[None]:
        """A context in which rows are not split: a row of one token, as in generation, cannot be."""
        self._whole_rows = True
        try:
            yield
        finally:
            self._whole_rows = False

    def size(self, axis: Axis) -> int:
        """Processes in this process' group of an axis."""
        group = self.groups[axis]
        return 1 if group is None else dist.get_world_size(group)

    def at(self, axis: GridAxis) -> int:
        """Returns the coordinate of this process."""
        return self._at[axis]

    @property
    def data_index(self) -> int:
        """The index of this process' portion of a batch, out of ``layout.data``."""
        replica = self.at("island") * (self.layout.replicas // self.layout.islands) + self.at("replica")
        return replica * self.layout.shard_size + self.at("shard")

    @property
    def is_first(self) -> bool:
        """Returns whether this process is rank 0, which writes and prints."""
        return self.rank == 0

    @cached_property
    def sharding(self) -> DeviceMesh:
        """The mesh for ``fully_shard``, which includes the context processes; two-dimensional with replicas. A
        collective."""
        layout = self.layout
        replicas = layout.replicas // layout.islands
        sizes = (layout.islands, layout.pipeline, replicas, layout.shard_size * layout.context, layout.tensor)
        names = ("island", "pipe", "replica", "shard", "tensor")
        whole = init_device_mesh(self.device.type, sizes, mesh_dim_names=names)
        sharding = whole["replica", "shard"] if replicas > 1 else whole["shard"]
        for group in sharding.get_all_groups():
            dist.distributed_c10d._set_pg_timeout(self._timeout, group)
        return sharding


def sum_over(group: dist.ProcessGroup | None, *tensors: torch.Tensor) -> None:
    """Sums tensors over a group, in place; those of one dtype share messages of at most `MESSAGE` elements."""
    if group is None:
        return
    by_type: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        by_type.setdefault(tensor.dtype, []).append(tensor)
    for message in (message for alike in by_type.values() for message in grouped(alike, torch.Tensor.numel, MESSAGE)):
        flat = torch.cat([t.reshape(-1) for t in message])
        dist.all_reduce(flat, group=group)
        for tensor, part in zip(message, flat.split([t.numel() for t in message]), strict=True):
            tensor.copy_(part.view_as(tensor))
