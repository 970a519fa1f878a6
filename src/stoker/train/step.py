"""One optimizer step: samples, micro-batches, gradients, and the update where all numbers are finite."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from stoker.data.order import stream_key
from stoker.train.batches import Batches
from stoker.train.engine import Counts, Engine
from stoker.train.faults.skipped_samples import Span
from stoker.train.hooks import Hook
from stoker.train.nonfinite_guard import NonfiniteGuard, StepNumbers
from stoker.train.optim.optimizer import set_rate
from stoker.train.task import Task

# A loss scale below it cannot help a gradient that is not finite: the gradient overflows without any scale.
LEAST_SCALE = 1.0


@dataclass(frozen=True)
class StepResult:
    """Result of a step, which was taken or skipped.

    Attributes:
        span: samples of the step.
        loss: mean over its targets.
        grad_norm: L2 norm of the gradient before clipping.
        taken: whether all numbers were finite, so that the optimizer stepped.
        wrong: whether it was skipped for another reason than a float16 overflow that a smaller loss scale can avoid.
        asked: whether a process was asked to stop.
        data_seconds: share of ``seconds`` spent on waiting for samples.
        measures: further measures of its objective, as means over its targets.
        alarms: about its samples, for people.
    """

    step: int
    span: Span
    counts: Counts
    loss: float
    grad_norm: float
    lr: float
    taken: bool
    wrong: bool
    asked: bool
    data_seconds: float
    seconds: float
    measures: Mapping[str, float] = field(default_factory=dict)
    alarms: Sequence[str] = ()

    @property
    def what_is_wrong(self) -> str:
        """Describes the number that is not finite."""
        if not math.isfinite(self.loss):
            return f"the loss is {self.loss}"
        return f"the gradient's norm is {self.grad_norm}"


class Stepper:
    """Takes the steps of a run.

    Args:
        buffers: see `NonfiniteGuard`.
        beat: called when a phase of a step begins.
        seed: seed of everything random within a step.
        clip: largest gradient norm; 0 for none.
    """

    def __init__(
        self,
        task: Task,
        batches: Batches,
        *,
        optimizer: Optimizer,
        scaler: torch.amp.GradScaler,
        engine: Engine,
        buffers: Callable[[], Sequence[Tensor]],
        beat: Callable[[str, int], None],
        hooks: Sequence[Hook],
        seed: int,
        clip: float,
    ) -> None:
        self._task, self._batches, self._optimizer = task, batches, optimizer
        self._scaler, self._engine = scaler, engine
        self._beat, self._hooks = beat, hooks
        self._seed, self._clip = seed, clip
        self._asks = [hook.coming for hook in hooks if hook.coming is not None] if task.lays_out_ahead else []
        self._guard = NonfiniteGuard(optimizer, scaler, engine, buffers)

    def take(
        self,
        step: int,
        span: Span,
        following: Sequence[Span],
        *,
        lr: float,
        asked: Callable[[], bool],
    ) -> StepResult:
        """Takes one step on the samples of ``span``.

        Args:
            following: samples of the next steps, the first of which are laid out meanwhile; empty at the last step.
            asked: returns whether this process has been asked to stop.
        """
        begin = time.perf_counter()
        self._beat("data", step)
        self._seed_generators(step)
        waiting = time.perf_counter()
        parts = self._batches.take(span)
        data_seconds = time.perf_counter() - waiting
        for hook in self._hooks:
            hook.before_passes(step)
        self._beat("train", step)
        # Not earlier: the thread competes with this one.
        self._batches.lay_out_ahead(following[: 2 if self._asks else 1])
        if following:
            for ask in self._asks:
                ask(self._batches.coming(following[0]))
        # Normalised by the targets of the whole step: accumulation, processes and padding cannot change the gradient.
        counts = self._engine.count(parts)
        completed = self._task.complete(parts, self._engine, counts.passes)
        self._optimizer.zero_grad(set_to_none=True)
        self._guard.begin()
        total = self._engine.train(completed, counts, self._scaler)
        for hook in self._hooks:
            total = hook.after_passes(step, total)
        self._beat("optimizer", step)
        set_rate(self._optimizer.param_groups, lr)
        self._scaler.unscale_(self._optimizer)
        norm = self._engine.clip(self._clip)
        measures = self._task.measures
        sums = measures.take(total) if measures is not None else None
        found = self._guard.step(total, norm, sums, asked=asked())
        for hook in self._hooks:
            hook.after_optimizer(lr, found.taken)
        alarms = self._task.after_passes(self._engine)
        return StepResult(
            step=step,
            span=span,
            counts=counts,
            loss=found.loss / max(1, counts.targets),
            grad_norm=found.grad_norm,
            lr=lr,
            taken=found.taken,
            wrong=is_wrong(found, self._scaler),
            asked=found.asked,
            data_seconds=data_seconds,
            seconds=time.perf_counter() - begin,
            measures={
                **(measures.means(found.sums, counts.targets) if measures is not None else {}),
                **self._task.figures,
            },
            alarms=alarms,
        )

    def _seed_generators(self, step: int) -> None:
        """Seeds the random state from (seed, step, process), so that a resumed run draws the same numbers."""
        stream = self._engine.rng_stream()
        key = stream_key(self._seed, 7, step, *([stream] if stream else []))
        random.seed(key)
        np.random.seed(key % 2**32)
        torch.manual_seed(key % 2**63)


def is_wrong(found: StepNumbers, scaler: torch.amp.GradScaler) -> bool:
    """Returns `StepResult.wrong` of a step, after which the scale was updated."""
    if found.taken:
        return False
    overflow = scaler.is_enabled() and math.isfinite(found.loss)
    return not overflow or scaler.get_scale() < LEAST_SCALE
