"""The result of a run.

Light to import: the supervisor of a run's processes reads their result, and loads no torch.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RunResult:
    """The outcome of a run, with the figures of its summary.

    Attributes:
        state: ``done``, ``stopped``, or ``paused`` if other processes continue the run right away.
        step, steps: done, and of the whole run.
        signal: that stopped it.
        first_loss, last_loss: of its first and its newest step.
        held_out_before, held_out: held-out loss before the first step and of the last step's weights; None if they
            were not evaluated.
        best_loss, best_step: of the lowest held-out loss.
        keep_best: whether that step's checkpoint is kept.
        exit_code: exit code of `stoker train`.
    """

    state: str
    step: int
    steps: int
    signal: int | None
    first_loss: float | None
    last_loss: float | None
    held_out_before: float | None
    held_out: float | None
    best_loss: float | None
    best_step: int | None
    keep_best: bool
    exit_code: int
