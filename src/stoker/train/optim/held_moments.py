"""Interface of storage formats of AdamW's moments, and operators on the parts of several parameters at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

MOMENTS = ("exp_avg", "exp_avg_sq")


class Codebook(NamedTuple):
    """The values of a quantised format, ascending, and the middles between them."""

    values: Tensor
    middles: Tensor
    signed: bool


Codebooks = Mapping[str, Codebook]  # by the moment's name


class HeldMoments(Protocol):
    """Storage format of the moments.

    A stored moment is one or more named tensors, which are split along the first dimension like the parameter.

    Attributes:
        rounds_at_random: whether `write` needs random numbers.
    """

    rounds_at_random: bool

    def zeros(self, name: str, parameter: Tensor) -> dict[str, Tensor]:
        """Returns a stored moment of zeros.

        Args:
            parameter: possibly sharded; the tensors of the moment have its placement.
        """

    def codebooks(self, device: torch.device, dtype: torch.dtype) -> Codebooks:
        """Returns the codebooks of `read` and `write`, for moments in ``dtype``; none for unquantised formats."""

    def read(self, name: str, held: Sequence[Mapping[str, Tensor]], dtype: torch.dtype, codebooks: Codebooks) -> Tensor:
        """Returns a moment of several parameters in ``dtype``, one after the other; one-dimensional."""

    def write(
        self,
        held: Sequence[Mapping[str, Tensor]],
        exact: Mapping[str, Tensor],
        noise: Sequence[Tensor] | None,
        bad: Tensor | None,
        codebooks: Codebooks,
    ) -> None:
        """Stores new values of both moments in ``held``, and may overwrite ``exact``.

        Args:
            exact: moments by name, as `read` returns them.
            noise: 16 random bits for each entry of each moment, int32; None if they are not needed.
            bad: 1 where the moments did not change, and ``held`` must not either; 0-d.
        """


def joined(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Concatenates tensors; a single one is returned without a copy."""
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors), dim)


def split_like(tensors: Sequence[Tensor], flat: Tensor) -> list[Tensor]:
    """Returns views of a one-dimensional tensor in the shapes of others."""
    parts = flat.split([x.numel() for x in tensors])
    return [part.view(x.shape) for part, x in zip(parts, tensors, strict=True)]


def store(places: Sequence[Tensor], flat: Tensor) -> None:
    """Copies a tensor into several, one after the other."""
    if len(places) == 1:
        places[0].copy_(flat.view(places[0].shape))
    else:  # one launch copies all of them, if they are contiguous
        torch._foreach_copy_(list(places), split_like(places, flat.contiguous()))
