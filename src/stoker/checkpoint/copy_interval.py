"""How often copies are made in memory: as often as they are asked for, or as they cost little."""

from __future__ import annotations

import math
import time
from collections import deque
from dataclasses import dataclass, field
from statistics import median

SHARE = 0.02  # of the time, what copies may take
STEPS = 16  # over which a step's time is taken


@dataclass
class Cadence:
    """When the next copy is due.

    Attributes:
        asked: steps between copies; 0 for none, None for as many as keep them within `SHARE` of the time.
        every: steps between copies, as they are made now.
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
        """Whether a copy is to be made after this step; to be asked after each, before anything else is done."""
        now = time.perf_counter()
        if self._began is not None:
            self._steps.append(now - self._began)
        if self.asked == 0:
            return False
        if self.asked is not None:
            return step % self.asked == 0
        return self._last is None or step >= self._last + self.every

    def stop(self) -> None:
        """No copies are made from now on."""
        self.asked = 0

    def begin_step(self) -> None:
        """The next step begins: what was done since `due` is no part of it."""
        self._began = time.perf_counter()

    @property
    def step_seconds(self) -> float | None:
        """Median time of a step; None before the first."""
        return median(self._steps) if self._steps else None

    def made(self, step: int, costs: list[tuple[float | None, float | None]]) -> bool:
        """A copy was made; says whether ``every`` has changed.

        Args:
            costs: of every process, the same list on all of them: seconds that a copy takes and seconds that a step
                takes, None where that is not known yet.
        """
        before, self._last = self.every, step
        copies = [copy for copy, _ in costs if copy is not None]
        steps = [seconds for _, seconds in costs if seconds]
        if self.asked is None and costs and len(copies) == len(steps) == len(costs):
            wanted = math.ceil(max(copies) / (SHARE * max(steps)))
            # A little more or less is noise.
            if not 0.5 * self.every <= wanted <= self.every:
                self.every = max(1, wanted)
        return self.every != before
