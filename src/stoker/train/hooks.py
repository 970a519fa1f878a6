"""What else happens in a step: rehearsed faults, the warm-up of new embedding rows, a record for TensorBoard."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from stoker.runs.run_folder import StepMetrics
from stoker.train.task import Part


@dataclass(frozen=True)
class Hook:
    """Functions that the loop calls in every step. Of several hooks the first is called first.

    Attributes:
        before_passes: takes the step, once its samples are there. Its time counts as this process' own.
        after_passes: takes the step and the summed loss of this process; returns the loss to go on with. Gradients
            are not clipped yet.
        after_optimizer: takes the learning rate, and whether the optimizer took the step; it leaves out one whose
            numbers are not finite.
        after_step: takes what was measured.
        after_run: called once no step follows, in a run that ends or pauses without an error.
        coming: takes what this process gets in the next step, before the passes of this one, unless this is the last.
            Batches are laid out one step earlier for it. Every process calls it in the same steps, so it may be a
            collective. None where nobody asks.
    """

    before_passes: Callable[[int], None] = lambda _step: None
    after_passes: Callable[[int, Tensor], Tensor] = lambda _step, loss: loss
    after_optimizer: Callable[[float, bool], None] = lambda _lr, _taken: None
    after_step: Callable[[StepMetrics], None] = lambda _metrics: None
    after_run: Callable[[], None] = lambda: None
    coming: Callable[[Sequence[Part]], None] | None = None
