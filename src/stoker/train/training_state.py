"""Saved state of a run: weights, the optimizer's moments, and the numbers of its progress."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.nn import Module
from torch.optim import Optimizer

from stoker.checkpoint.chunks import Held
from stoker.checkpoint.run_weights import held_weights
from stoker.checkpoint.state import Saved, State
from stoker.checkpoint.storage import BASE
from stoker.checkpoint.tensor_names import ISLAND, POWER_SGD
from stoker.parallel.shard_spec import NamedShards
from stoker.train.optim.saved_moments import empty_moments, moment_chunks
from stoker.train.run_schedule import Progress


class FurtherState(Protocol):
    """State in checkpoints beside the weights and the optimizer's moments. All methods are collectives.

    Attributes:
        streams: whether it is written to disk part by part, as it is too large to be copied in memory.
        base: step of the full checkpoint that the last result of `now` adds to; None if that result is full.
    """

    @property
    def base(self) -> int | None:
        return None

    @property
    def streams(self) -> bool:
        return False

    def now(self, step: int, is_whole: Callable[[int], bool] | None) -> Held:
        """Returns this process' tensors, under names that no weight has.

        Args:
            step: step of the checkpoint.
            is_whole: returns whether a step's full checkpoint exists for this one to add to; None to save everything.
        """

    def places(self, saved: Mapping[str, Saved]) -> Held:
        """Returns the destinations of its tensors in a checkpoint."""

    def restored(self) -> None:
        """Applies the restored tensors."""


class TrainingState:
    """State of a model in training.

    Args:
        shards: names and pieces of the parameters.
        further: other saved state.
        island: (number of this process' island, number of islands). Islands have different weights between two
            synchronisations, and always different moments; the first island's have the usual names.
    """

    def __init__(
        self,
        model: Module,
        optimizer: Optimizer,
        scaler: torch.amp.GradScaler,
        *,
        shards: NamedShards,
        further: Sequence[FurtherState],
        island: tuple[int, int],
    ) -> None:
        self._further, self._islands = further, island[1]
        self._prefix = f"{ISLAND}{island[0]}/" if island[0] else ""
        self.left_out = 0  # number of islands in the restored state beyond those of this run
        self.forgets = False  # whether the restored state has PowerSGD's state of another layout
        self._model, self._optimizer, self._scaler = model, optimizer, scaler
        self._shards = shards

    def now(self, progress: Progress, is_whole: Callable[[int], bool] | None = None) -> State:
        """Returns the current state, by reference.

        Args:
            is_whole: returns whether a step's full checkpoint exists; for a checkpoint that may add to it.
        """
        further = {name: chunks for part in self._further for name, chunks in part.now(progress.step, is_whole).items()}
        base = next((part.base for part in self._further if part.base is not None), None)
        own = {
            **held_weights(self._model, self._shards),
            **moment_chunks(self._model, self._optimizer, self._shards),
        }
        return State(
            progress.step,
            {**self._named(own), **further},
            {"progress": vars(progress), "scaler": self._scaler.state_dict(), **({} if base is None else {BASE: base})},
            streams=any(part.streams for part in self._further),
        )

    def places(self, saved: Mapping[str, Saved]) -> Held:
        """Returns the destinations of a checkpoint's tensors. An island that it lacks starts from the first one's
        state.
        """
        prefix, islands = self._prefix, {name.partition("/")[0] for name in saved if name.startswith(ISLAND)}
        self.left_out = max(0, len(islands) + 1 - self._islands)
        known = bool(prefix) and any(name.startswith(prefix) for name in saved)
        own = {n.removeprefix(prefix): e for n, e in saved.items() if n.startswith(prefix)} if known else saved
        moments = empty_moments(self._model, self._optimizer, own, self._shards)
        held = {**held_weights(self._model, self._shards), **moments}
        further = {name: chunks for part in self._further for name, chunks in part.places(saved).items()}
        self.forgets = _compressed(saved) and not _compressed(further)
        return {**(self._named(held) if known else held), **further}

    def _named(self, held: Held) -> Held:
        return {f"{self._prefix}{name}": chunks for name, chunks in held.items()}

    def restored(self, numbers: Mapping[str, Any]) -> Progress:
        """Applies the numbers of a state whose tensors have been restored."""
        self._scaler.load_state_dict(numbers["scaler"])
        for part in self._further:
            part.restored()
        progress = dict(numbers["progress"])
        if "passed" in progress:  # the name in earlier checkpoints
            progress["skipped"] = progress.pop("passed")
        return Progress(**progress)


def _compressed(names: Iterable[str]) -> bool:
    """Returns whether any of the names is one of PowerSGD's state."""
    return any(name.startswith(POWER_SGD) for name in names)
