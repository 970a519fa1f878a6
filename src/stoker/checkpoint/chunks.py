"""What a process holds of the tensors of a run: boxes of whole tensors, wherever a layout has put them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from stoker.parallel.shard_spec import Piece, chunk


@dataclass(frozen=True, eq=False)
class Chunk:
    """A box of a whole tensor.

    Attributes:
        tensor: the box itself, possibly empty; written into when a checkpoint is restored.
        offsets: where the box begins in the whole tensor, one number a dimension.
        shape: of the whole tensor.
    """

    tensor: Tensor
    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, tensor: Tensor) -> Chunk:
        """A tensor that this process holds all of."""
        return cls(tensor.detach(), (0,) * tensor.dim(), tuple(tensor.shape))


# By the tensor's name in the whole model. Several chunks are copies of each other: a tied head beside its embedding.
Held = Mapping[str, Sequence[Chunk]]


@torch.no_grad()
def chunk_of(tensor: Tensor, piece: Piece | None = None) -> Chunk:
    """Which box of the whole a parameter, its gradient or its moment is.

    Args:
        tensor: this process' part after tensor parallelism; FSDP may have cut that part further.
        piece: which part it was before FSDP cut it; None for all of it.
    """
    shape = tuple(tensor.shape) if piece is None else piece.shape
    offsets = [0] * tensor.dim()
    if piece is not None and piece.dim is not None:
        offsets[piece.dim] = piece.start
    if isinstance(tensor, DTensor):
        mesh = tensor.device_mesh
        at = mesh.get_coordinate()
        assert at is not None
        for axis, placement in enumerate(tensor.placements):
            if isinstance(placement, Shard):
                offsets[placement.dim] += chunk(tensor.shape[placement.dim], mesh.size(axis), at[axis])[0]
        tensor = tensor.to_local()
    return Chunk(tensor.detach(), tuple(offsets), shape)
