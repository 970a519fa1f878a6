"""What a process holds of the tensors of a run: boxes of whole tensors, wherever a layout has put them."""

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

    def data(self) -> Tensor:
        """The box itself, to be saved."""
        return self.tensor.detach()

    def place(self) -> Tensor:
        """Where the box goes when it is restored."""
        return self.tensor

    def filled(self) -> None:
        """Says that a part of the box has been restored."""


@dataclass(frozen=True, eq=False)
class DeferredChunk(Chunk):
    """A whole tensor that is made when its turn to be saved has come: ``tensor`` has its shape and type alone.

    Attributes:
        read: makes it.
    """

    read: Callable[[], Tensor]

    @classmethod
    def of(cls, shape: tuple[int, ...], dtype: torch.dtype, read: Callable[[], Tensor]) -> DeferredChunk:
        """One of this shape and type."""
        return cls(torch.empty(shape, dtype=dtype, device="meta"), (0,) * len(shape), shape, read)

    def data(self) -> Tensor:
        return self.read()


@dataclass(frozen=True, eq=False)
class ArrivingChunk(Chunk):
    """A whole tensor, saved as one box, that gets its memory when it is restored: ``tensor`` has its shape and type.

    Attributes:
        take: takes it over then.
    """

    take: Callable[[Tensor], None]
    _arriving: list[Tensor] = field(default_factory=list)

    @classmethod
    def of(cls, shape: tuple[int, ...], dtype: torch.dtype, take: Callable[[Tensor], None]) -> ArrivingChunk:
        """One of this shape and type."""
        return cls(torch.empty(shape, dtype=dtype, device="meta"), (0,) * len(shape), shape, take)

    def place(self) -> Tensor:
        self._arriving.append(torch.empty(self.shape, dtype=self.tensor.dtype))
        return self._arriving[-1]

    def filled(self) -> None:
        self.take(self._arriving.pop())


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
