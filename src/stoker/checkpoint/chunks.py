"""Chunks: the boxes of whole tensors that a process holds, for any layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from stoker.parallel.shard_spec import Piece, chunk


@dataclass(frozen=True, eq=False)
class Chunk:
    """A box of a whole tensor.

    Attributes:
        tensor: the box, possibly empty; a restore writes into it.
        offsets: start of the box in the whole tensor, one number per dimension.
        shape: shape of the whole tensor.
    """

    tensor: Tensor
    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, tensor: Tensor) -> Chunk:
        """Returns the chunk of a tensor that this process holds completely."""
        return cls(tensor.detach(), (0,) * tensor.dim(), tuple(tensor.shape))

    def data(self) -> Tensor:
        """Returns the box, to be saved."""
        return self.tensor.detach()

    def place(self) -> Tensor:
        """Returns the destination of the box for a restore."""
        return self.tensor

    def filled(self) -> None:
        """Called when a part of the box has been restored."""


@dataclass(frozen=True, eq=False)
class DeferredChunk(Chunk):
    """A whole tensor that is created only when it is saved; ``tensor`` has just its shape and dtype.

    Attributes:
        read: creates it.
    """

    read: Callable[[], Tensor]

    @classmethod
    def of(cls, shape: tuple[int, ...], dtype: torch.dtype, read: Callable[[], Tensor]) -> DeferredChunk:
        """Returns a chunk of this shape and dtype."""
        return cls(torch.empty(shape, dtype=dtype, device="meta"), (0,) * len(shape), shape, read)

    def data(self) -> Tensor:
        return self.read()


@dataclass(frozen=True, eq=False)
class ArrivingChunk(Chunk):
    """A whole tensor, saved as one box, that is allocated when it is restored; ``tensor`` has just its shape and dtype.

    Attributes:
        take: receives the restored tensor.
    """

    take: Callable[[Tensor], None]
    _arriving: list[Tensor] = field(default_factory=list)

    @classmethod
    def of(cls, shape: tuple[int, ...], dtype: torch.dtype, take: Callable[[Tensor], None]) -> ArrivingChunk:
        """Returns a chunk of this shape and dtype."""
        return cls(torch.empty(shape, dtype=dtype, device="meta"), (0,) * len(shape), shape, take)

    def place(self) -> Tensor:
        self._arriving.append(torch.empty(self.shape, dtype=self.tensor.dtype))
        return self._arriving[-1]

    def filled(self) -> None:
        self.take(self._arriving.pop())


# Keyed by the tensor's name in the whole model. Several chunks are copies: a tied head beside its embedding.
Held = Mapping[str, Sequence[Chunk]]


@torch.no_grad()
def chunk_of(tensor: Tensor, piece: Piece | None = None) -> Chunk:
    """Returns the chunk of a parameter, its gradient or its moment.

    Args:
        tensor: this process' shard after tensor parallelism; FSDP may have sharded it further.
        piece: the tensor-parallel shard; None for the whole parameter.
    """
    shape = tuple(tensor.shape) if piece is None else piece.shape
    offsets = [0] * tensor.dim()
    if piece is not None:
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
