"""What of a run is saved and restored: weights, the optimizer's moments, and the numbers of its progress."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch.nn import Module
from torch.optim import Optimizer

from stoker.checkpoint.chunks import Held
from stoker.checkpoint.run_weights import NONE, held_weights
from stoker.checkpoint.state import Saved, State
from stoker.parallel.shard_spec import Piece
from stoker.train.optimizer import empty_moments, held_moments
from stoker.train.run_schedule import Progress


class FurtherState(Protocol):
    """What checkpoints hold beside the weights and the optimizer's moments. All of it is collective."""

    def now(self) -> Held:
        """What this process holds, under names that no weight has."""

    def places(self, saved: Mapping[str, Saved]) -> Held:
        """Where those of a checkpoint's tensors go that are its own."""

    def restored(self) -> None:
        """Takes over what has been put in these places."""


class TrainingState:
    """The state of a model in training.

    Args:
        pieces: by parameter, the part of a whole one that this process holds.
        aliases: names under which checkpoints have parameters.
        further: what else is saved.
    """

    def __init__(
        self,
        model: Module,
        optimizer: Optimizer,
        scaler: torch.amp.GradScaler,
        pieces: Mapping[str, Piece] = NONE,
        aliases: Mapping[str, str] = NONE,
        further: FurtherState | None = None,
    ) -> None:
        self._further = further
        self._model, self._optimizer, self._scaler = model, optimizer, scaler
        self._names = (pieces, aliases)

    def now(self, progress: Progress) -> State:
        """The current state, by reference."""
        return State(
            progress.step,
            {
                **held_weights(self._model, *self._names),
                **held_moments(self._model, self._optimizer, *self._names),
                **(self._further.now() if self._further else {}),
            },
            {"progress": vars(progress), "scaler": self._scaler.state_dict()},
        )

    def places(self, saved: Mapping[str, Saved]) -> Held:
        """Where a checkpoint's tensors go."""
        moments = empty_moments(self._model, self._optimizer, saved, *self._names)
        further = self._further.places(saved) if self._further else {}
        return {**held_weights(self._model, *self._names), **moments, **further}

    def restored(self, numbers: Mapping[str, Any]) -> Progress:
        """Takes over the numbers of a state whose tensors have been put in their places."""
        self._scaler.load_state_dict(numbers["scaler"])
        if self._further:
            self._further.restored()
        progress = dict(numbers["progress"])
        if "passed" in progress:  # the name in earlier checkpoints
            progress["skipped"] = progress.pop("passed")
        return Progress(**progress)
