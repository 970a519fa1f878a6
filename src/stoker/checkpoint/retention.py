"""Which checkpoints are kept, and the deletion of the others. No torch here: the background writers use it."""

from __future__ import annotations

from dataclasses import dataclass

from stoker.checkpoint.storage import Storage, base_of


@dataclass(frozen=True)
class Keep:
    """Which checkpoints are kept.

    Attributes:
        newest: how many of the newest are kept.
        every: also those of steps that this number divides.
        best: also the one of this step.
    """

    newest: int
    every: int | None = None
    best: int | None = None

    def doomed(self, steps: list[int]) -> list[int]:
        """Those of ``steps``, ascending, that are not kept."""
        older = steps[: len(steps) - self.newest] if self.newest < len(steps) else []
        return [s for s in older if s != self.best and not (self.every and s % self.every == 0)]


def retain(storage: Storage, keep: Keep) -> None:
    """Deletes the checkpoints that are neither kept nor the base of one that is.

    The newest first, so that none is there without its base, whenever this ends.
    """
    steps = storage.steps()
    if doomed := set(keep.doomed(steps)):
        needed = {base_of(storage, step) for step in steps if step not in doomed}
        for step in sorted(doomed - needed, reverse=True):
            storage.delete(step)
