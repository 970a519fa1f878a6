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
    """A checkpoint that cannot be read back: files are missing, truncated or altered."""


@dataclass(frozen=True)
class State:
    """State that a run resumes from.

    Attributes:
        step: optimizer steps done.
        tensors: ``model/<parameter>``, ``optimizer/<parameter>/<moment>`` and ``buffer/<name>``: whole, or this
            process' chunks.
        numbers: everything else, as JSON: samples consumed, loss scale, best held-out loss ...
        streams: whether it is written to disk part by part, because memory has no room for a copy.
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
    """Shape and dtype of a tensor in a checkpoint."""

    shape: tuple[int, ...]
    dtype: torch.dtype


# Returns the destination chunks of a checkpoint's tensors, by name, from their shapes and dtypes.
Places = Callable[[Mapping[str, Saved]], Held]


@dataclass(frozen=True)
class SaveOutcome:
    """Outcome of saving a state.

    Attributes:
        where: on disk, or in memory.
        seconds: time from the start of the save until it was complete.
        stall: seconds that training was stopped for it.
        bytes: total bytes written; 0 if nothing was.
        every: new interval of in-memory copies in steps; None for a checkpoint.
        deleted: checkpoints deleted to make room for it.
        error: error that prevented it.
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
        aside: its new path.
    """

    step: int
    error: DamagedError
    aside: str


@dataclass(frozen=True)
class Restored:
    """A restored state."""

    step: int
    numbers: dict[str, Any]
    where: Where
