"""Retention of checkpoints, and the deletion of the others. Imports no torch, as the background writers use it."""

from __future__ import annotations

from dataclasses import dataclass

from stoker.checkpoint.storage import Storage, base_of


@dataclass(frozen=True)
class Keep:
    """Retention rule of checkpoints.

    Attributes:
        newest: number of newest checkpoints that are kept.
        every: also keeps those at multiples of this step.
        best: also keeps the one of this step.
    """

    newest: int
    every: int | None = None
    best: int | None = None

    def doomed(self, steps: list[int]) -> list[int]:
        """Returns those of ``steps``, ascending, that are not kept."""
        older = steps[: len(steps) - self.newest] if self.newest < len(steps) else []
        return [s for s in older if s != self.best and not (self.every and s % self.every == 0)]


def retain(storage: Storage, keep: Keep) -> None:
    """Deletes the checkpoints that are neither kept nor the base of a kept one.

    The newest is deleted first, so that an interruption leaves none without its base.
    """
    steps = storage.steps()
    if doomed := set(keep.doomed(steps)):
        needed = {base_of(storage, step) for step in steps if step not in doomed}
        for step in sorted(doomed - needed, reverse=True):
            storage.delete(step)
