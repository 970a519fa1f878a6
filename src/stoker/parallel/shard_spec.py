"""A process' part of a whole tensor."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


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


def chunk(size: int, parts: int, index: int) -> tuple[int, int]:
    """Returns the range of the ``index``-th of ``parts`` parts of a dimension, as in ``torch.chunk``.

    Parts have the same size, rounded up; the last ones may be smaller or empty.
    """
    step = -(-size // parts)
    return min(size, index * step), min(size, (index + 1) * step)
