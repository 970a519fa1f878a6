"""Hooks into the training step: injected faults, the warm-up of new embedding rows, trackers of metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from stoker.runs.step_metrics import StepMetrics
from stoker.train.task import Part


@dataclass(frozen=True)
class Hook:
    """Callbacks that the loop calls in every step, in the order of its hooks.

    Attributes:
        before_passes: takes the step, once its samples are loaded. Its time counts as this process' own.
        after_passes: takes the step and this process' summed loss; returns the loss to use. Gradients are not clipped
            yet.
        after_optimizer: takes the learning rate, and whether the optimizer took the step; it skips steps with numbers
            that are not finite.
        after_step: takes the step's metrics.
        evaluated: takes the step and the figures of an evaluation by name.
        after_run: called after the last step of a run that ends or pauses without an error.
        coming: takes this process' parts of the next step, before the passes of the current one; not called in the last
            step. Batches are laid out one step earlier for it. Every process calls it in the same steps, so it may be a
            collective. None if it is not needed.
    """

    before_passes: Callable[[int], None] = lambda _step: None
    after_passes: Callable[[int, Tensor], Tensor] = lambda _step, loss: loss
    after_optimizer: Callable[[float, bool], None] = lambda _lr, _taken: None
    after_step: Callable[[StepMetrics], None] = lambda _metrics: None
    evaluated: Callable[[int, Mapping[str, Any]], None] = lambda _step, _figures: None
    after_run: Callable[[], None] = lambda: None
    coming: Callable[[Sequence[Part]], None] | None = None
