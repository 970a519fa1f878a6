"""Interval of in-memory copies: as the job says, or as often as they cost little."""

from __future__ import annotations

import math
import time
from collections import deque
from dataclasses import dataclass, field
from statistics import median

SHARE = 0.02  # share of the time that copies may take
STEPS = 16  # recent steps that the step time is measured over


@dataclass
class CopyInterval:
    """Schedule of the next copy.

    Attributes:
        asked: steps between copies; 0 for none, None for the interval that keeps them within `SHARE` of the time.
        every: current steps between copies.
    """

    asked: int | None
    every: int = 1
    _last: int | None = None
    _began: float | None = None
    _steps: deque[float] = field(default_factory=lambda: deque(maxlen=STEPS))

    def __post_init__(self) -> None:
        if self.asked:
            self.every = self.asked

    def due(self, step: int) -> bool:
        """Returns whether a copy is due after this step; must be called right after each step."""
        now = time.perf_counter()
        if self._began is not None:
            self._steps.append(now - self._began)
        if self.asked == 0:
            return False
        if self.asked is not None:
            return step % self.asked == 0
        return self._last is None or step >= self._last + self.every

    def stop(self) -> None:
        """Disables copies from now on."""
        self.asked = 0

    def begin_step(self) -> None:
        """Starts the timing of the next step; time since `due` is excluded."""
        self._began = time.perf_counter()

    @property
    def step_seconds(self) -> float | None:
        """Median time of a step; None before the first."""
        return median(self._steps) if self._steps else None

    def made(self, step: int, costs: list[tuple[float | None, float | None]]) -> bool:
        """Records a copy; returns whether ``every`` has changed.

        Args:
            costs: for every process, the same list on all: seconds per copy and per step, None if not yet known.
        """
        before, self._last = self.every, step
        copies = [copy for copy, _ in costs if copy is not None]
        steps = [seconds for _, seconds in costs if seconds]
        if self.asked is None and costs and len(copies) == len(steps) == len(costs):
            wanted = math.ceil(max(copies) / (SHARE * max(steps)))
            # Ignores small changes as noise.
            if not 0.5 * self.every <= wanted <= self.every:
                self.every = max(1, wanted)
        return self.every != before
