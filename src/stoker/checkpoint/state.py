"""The state that a run resumes from, and the outcomes of saving and restoring it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from stoker.checkpoint.chunks import Chunk, Held
from stoker.errors import RunFailed

Where = Literal["disk", "memory"]


class DamagedError(RunFailed):
    """A checkpoint cannot be read back: files of it are missing, cut or altered."""


@dataclass(frozen=True)
class State:
    """What a run needs to go on.

    Attributes:
        step: optimizer steps done.
        tensors: ``model/<parameter>``, ``optimizer/<parameter>/<moment>`` and ``buffer/<name>``: whole, or what this
            process holds of them.
        numbers: everything else, as JSON: samples consumed, loss scale, best held-out loss ...
        streams: whether it is written to the disk part by part, as there is no memory for a copy of it.
    """

    step: int
    tensors: Mapping[str, Tensor | Sequence[Chunk]]
    numbers: dict[str, Any]
    streams: bool = False

    @property
    def held(self) -> Held:
        """The tensors as chunks."""
        return {name: [Chunk.whole(t)] if isinstance(t, Tensor) else t for name, t in self.tensors.items()}


@dataclass(frozen=True)
class Saved:
    """A tensor in a checkpoint."""

    shape: tuple[int, ...]
    dtype: torch.dtype


# Gives the chunks that the tensors of a checkpoint are read into, by name, from their shapes and types.
Places = Callable[[Mapping[str, Saved]], Held]


@dataclass(frozen=True)
class SaveOutcome:
    """How the saving of a state ended.

    Attributes:
        where: on the disk, or in memory.
        seconds: from its beginning until it was whole.
        stall: seconds that training stood still for it.
        bytes: of all that was written; 0 where it was not.
        every: steps between copies in memory from now on; None for a checkpoint.
        deleted: checkpoints that were deleted before, to make room for it.
        error: why it was not written.
    """

    step: int
    where: Where
    seconds: float
    stall: float
    bytes: int
    every: int | None = None
    deleted: tuple[int, ...] = ()
    error: RunFailed | None = None


@dataclass(frozen=True)
class Damaged:
    """A checkpoint that could not be read, so an older one was restored.

    Attributes:
        error: what is wrong with it.
        aside: where it is now.
    """

    step: int
    error: DamagedError
    aside: str


@dataclass(frozen=True)
class Restored:
    """A state that a run goes on from."""

    step: int
    numbers: dict[str, Any]
    where: Where
