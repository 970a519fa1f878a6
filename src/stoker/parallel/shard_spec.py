"""A process' part of whole tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor
from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class Piece:
    """Indices [start, stop) of one dimension of a whole tensor.

    Attributes:
        dim: the dimension that is split.
        shape: of the whole tensor.
    """

    dim: int
    start: int
    stop: int
    shape: tuple[int, ...]

    def of(self, whole: Tensor) -> Tensor:
        """Returns this part of the whole tensor, a view."""
        return whole.narrow(self.dim, self.start, self.stop - self.start)


@dataclass(frozen=True)
class NamedShards:
    """Names and pieces of the parameters of a process' part of a model.

    Attributes:
        pieces: pieces of the parameters that are split by tensor parallelism, by name in the part.
        aliases: name in the whole model by name in the part, if they differ: on pipeline stages, and for the last
            stage's copy of a tied embedding, its head.
    """

    pieces: Mapping[str, Piece] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)


WHOLE = NamedShards()  # no parameter is split by tensor parallelism or renamed


def local_shard(tensor: Tensor) -> Tensor:
    """Returns this process' shard of a DTensor, and any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def chunk(size: int, parts: int, index: int) -> tuple[int, int]:
    """Returns the range of the ``index``-th of ``parts`` parts of a dimension, as in ``torch.chunk``.

    Parts have the same size, rounded up; the last ones may be smaller or empty.
    """
    step = -(-size // parts)
    return min(size, index * step), min(size, (index + 1) * step)


def even_part(size: int, parts: int, index: int) -> tuple[int, int]:
    """Returns the range of the ``index``-th of ``parts`` parts whose sizes differ by one at most.

    No part is empty if ``size`` is at least ``parts``.
    """
    return size * index // parts, size * (index + 1) // parts
