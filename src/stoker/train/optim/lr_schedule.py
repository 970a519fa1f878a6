"""Learning rate as a pure function of the step."""

from __future__ import annotations

import math
from dataclasses import dataclass

WSD_DECAY = 0.2  # the last fifth; Hägele et al. (2024) find 10-20 % enough


@dataclass(frozen=True)
class Schedule:
    """Linear warm-up, then one of the shapes.

    An embedding warm-up (`stoker.train.step_hooks.embedding_warmup`) is a stage in front of them. It warms up as the
    rest does, then stays at the peak.

    Attributes:
        peak: the learning rate after the warm-up.
        steps: steps of the run, without that stage.
        warmup: steps of the warm-up.
        shape: ``linear``, ``cosine``, ``wsd`` or ``constant``.
        floor: the final learning rate as a fraction of the peak.
        first: steps of that stage.
    """

    peak: float
    steps: int
    warmup: int
    shape: str
    floor: float = 0.0
    first: int = 0

    def lr(self, step: int) -> float:
        """Returns the learning rate of optimizer step ``step``, counted from 1."""
        if step <= self.first:
            return self.peak * min(1.0, step / max(1, self.warmup))
        step -= self.first
        if step <= self.warmup:
            return self.peak * step / self.warmup
        progress = (step - self.warmup - 1) / max(1, self.steps - self.warmup)  # in [0, 1)
        return self.peak * (self.floor + (1.0 - self.floor) * SHAPES[self.shape](progress))


def warmup_steps(warmup: int | float, steps: int) -> int:
    """Returns the steps of a warm-up given in steps or as a fraction of all steps."""
    return warmup if isinstance(warmup, int) else round(warmup * steps)


SHAPES = {
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
    "wsd": lambda progress: min(1.0, (1.0 - progress) / WSD_DECAY),
    "constant": lambda progress: 1.0,
}
