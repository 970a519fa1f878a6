"""Allocates a meta model's parameters and reads this process' part of their values."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from stoker.models.meta_model import allocate
from stoker.models.weight_source import Rows, WeightSource, all_rows, fill
from stoker.parallel.shard_spec import Piece, chunk, local_shard


def materialise(
    model: nn.Module,
    source: WeightSource,
    placements: Mapping[str, Piece],
    device: torch.device,
    *,
    offload: bool = False,
) -> None:
    """Allocates the parameters of the meta device on a device, and reads this process' part of their values.

    Comes after splitting and sharding, and before DDP. Parameters are new objects afterwards, except those of
    ``fully_shard``; shared ones stay shared.

    Args:
        source: by the names of the model's parameters.
        placements: by the same names, the piece of the whole tensor that a parameter is before ``fully_shard``;
            parameters without one are whole.
        offload: whether parameters stay in host memory, as ``fully_shard`` with offloading requires.

    Raises:
        UserError: the weights cannot be read.
    """
    wanted = []
    for name, parameter in allocate(model, device, offload=offload).items():
        into = local_shard(parameter)
        wanted.append((name, rows_held(parameter, placements.get(name)), into.data))
    fill(wanted, source)


def rows_held(parameter: torch.Tensor, piece: Piece | None) -> Rows:
    """Returns the part of the whole tensor that a parameter has on this process.

    Args:
        piece: of the whole tensor, before ``fully_shard``; None if it is whole then.
    """
    rows = list(all_rows(parameter.shape if piece is None else piece.shape))
    if piece is not None:
        rows[piece.dim] = slice(piece.start, piece.stop)
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        for axis, placement in enumerate(parameter.placements):
            assert type(placement) in (Shard, Replicate), f"{placement} is not a placement of fully_shard"
            if isinstance(placement, Shard):
                held = rows[placement.dim]
                start, stop = chunk(held.stop - held.start, mesh.size(axis), mesh.get_local_rank(axis))
                rows[placement.dim] = slice(held.start + start, held.start + stop)
    local = local_shard(parameter)
    sizes = tuple(row.stop - row.start for row in rows)
    assert sizes == tuple(local.shape), f"{sizes} indices are held in the shape {tuple(local.shape)}"
    return tuple(rows)
