"""A checkpoint that the background writer has not finished."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stoker.checkpoint.shm_buffers import Slot


@dataclass
class PendingWrite:
    """A checkpoint that is being written in the background.

    Attributes:
        place: folder or URL of the checkpoints.
        attempt: name from `Storage.begin`.
        slot: the copy that it is written from.
        begun: start of the save, seconds since 1970.
        stall: seconds that training waited for it.
        deleted: checkpoints deleted to make room for it.
        answers: the writer's replies about it.
        reported: whether its outcome has been reported.
    """

    step: int
    place: Path | str
    attempt: str
    slot: Slot
    begun: float
    stall: float
    deleted: tuple[int, ...]
    answers: list[dict[str, Any]] = field(default_factory=list)
    reported: bool = False
