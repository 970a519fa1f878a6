"""One optimizer step: samples, micro-batches, gradients, and the step itself where all numbers are finite."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

from stoker.data.order import stream_key
from stoker.train.batches import Batches
from stoker.train.engine import Counts, Engine
from stoker.train.hooks import Hook
from stoker.train.optimizer import set_rate
from stoker.train.run_schedule import RunSchedule
from stoker.train.skipped_samples import Span
from stoker.train.task import Task

Beat = Callable[[str, int], None]


@dataclass(frozen=True)
class StepResult:
    """The outcome of a step, which was taken or skipped because of its numbers.

    Attributes:
        span: its samples.
        loss: mean over its targets.
        grad_norm: L2 norm of the gradient before clipping.
        wrong: whether it was skipped for another reason than an overflow of float16, which the loss scale handles.
        asked: whether a process was asked to stop.
        data_seconds: spent on waiting for samples, of ``seconds`` in all.
        measures: what else its objective measured, as means over its targets.
    """

    step: int
    span: Span
    counts: Counts
    loss: float
    grad_norm: float
    lr: float
    wrong: bool
    asked: bool
    data_seconds: float
    seconds: float
    measures: Mapping[str, float] = field(default_factory=dict)

    @property
    def what_is_wrong(self) -> str:
        """Which of its numbers is not finite."""
        if not math.isfinite(self.loss):
            return f"the loss is {self.loss}"
        return f"the gradient's norm is {self.grad_norm}"


class Stepper:
    """Takes the steps of a run.

    Args:
        beat: called as a phase of a step begins.
    """

    def __init__(
        self,
        task: Task,
        batches: Batches,
        *,
        optimizer: Optimizer,
        scaler: torch.amp.GradScaler,
        engine: Engine,
        buffers: Sequence[Tensor] = (),
        beat: Beat = lambda _phase, _step: None,
        hooks: Sequence[Hook] = (),
    ) -> None:
        self._task, self._batches, self._optimizer = task, batches, optimizer
        self._scaler, self._engine = scaler, engine
        self._beat, self._hooks = beat, hooks
        self._asks = [hook.coming for hook in hooks if hook.coming is not None] if task.lays_out_ahead else []
        self._guard = NonfiniteGuard(optimizer, scaler, engine, buffers)

    def take(
        self,
        step: int,
        span: Span,
        following: Sequence[Span],
        *,
        plan: RunSchedule,
        lr: float,
        asked: Callable[[], bool],
    ) -> StepResult:
        """One step on the samples of ``span``.

        Args:
            following: the samples of the next steps, of which the first are laid out meanwhile; none after the last.
            asked: whether this process has been asked to stop by now.
        """
        begin = time.perf_counter()
        self._beat("data", step)
        self._seed(plan.seed, step)
        waiting = time.perf_counter()
        parts = self._batches.take(span)
        data_seconds = time.perf_counter() - waiting
        for hook in self._hooks:
            hook.before_passes(step)
        self._beat("train", step)
        # Not before: the thread takes turns with this one.
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
        norm = self._engine.clip(plan.clip)
        measures = self._task.measures
        sums = measures.take(total) if measures is not None else None
        found = self._guard.step(total, norm, sums, asked=asked())
        for hook in self._hooks:
            hook.after_optimizer(lr, found.taken)
        return StepResult(
            step,
            span,
            counts,
            found.loss / max(1, counts.targets),
            found.grad_norm,
            lr,
            self._is_wrong(found),
            found.asked,
            data_seconds,
            time.perf_counter() - begin,
            {**(measures.means(found.sums, counts.targets) if measures is not None else {}), **self._task.figures},
        )

    def _is_wrong(self, found: StepNumbers) -> bool:
        return not found.taken and not (self._scaler.is_enabled() and found.loss_is_finite)

    def _seed(self, seed: int, step: int) -> None:
        """The random state is a function of (seed, step, process), so a resumed run draws the same numbers."""
        seat = self._engine.seat()
        key = stream_key(seed, 7, step, *([seat] if seat else []))
        random.seed(key)
        np.random.seed(key % 2**32)
        torch.manual_seed(key % 2**63)


@dataclass(frozen=True)
class StepNumbers:
    """What the host learns of a step once it has been launched.

    Attributes:
        loss: summed over the step's targets and the processes.
        grad_norm: L2 norm of the gradient before clipping.
        loss_is_finite, taken: whether the loss, and whether loss and gradient were finite, so that the step was
            taken.
        asked: whether a process was asked to stop.
        sums: what else was measured, summed over the step's targets and the processes.
    """

    loss: float
    grad_norm: float
    loss_is_finite: bool
    taken: bool
    asked: bool
    sums: tuple[float, ...]


class NonfiniteGuard:
    """Leaves out every step whose loss or gradient is not finite on any process.

    Weights, moments and buffers are then what they were, to the bit. A fused AdamW gets a flag on its device, as
    `torch.amp.GradScaler` passes it an overflow: the host waits once a step, when all of it has been launched.
    Other optimizers take no flag; for them the host waits before the step.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        scaler: torch.amp.GradScaler,
        engine: Engine,
        buffers: Sequence[Tensor] = (),
    ) -> None:
        """
        Args:
            buffers: what forward passes change (batch norm's averages), to be put back after a step left out.
        """
        self._optimizer, self._scaler, self._engine, self._buffers = optimizer, scaler, engine, buffers
        self._on_device = isinstance(optimizer, AdamW) and bool(optimizer.defaults.get("fused"))
        self._before: list[Tensor] = []

    def begin(self) -> None:
        """Before the forward passes."""
        self._before = [buffer.clone() for buffer in self._buffers]

    @torch.no_grad()
    def step(self, loss: Tensor, norm: Tensor, sums: Tensor | None = None, *, asked: bool) -> StepNumbers:
        """Takes the optimizer's step, or leaves it out.

        Args:
            loss: of this process, summed.
            norm: of the gradient of all processes.
            sums: what else this process measured, shape (measures,).
            asked: whether this process was asked to stop.
        """
        norm = norm.to(loss)
        flags = torch.stack([norm.isfinite().logical_not().to(loss), torch.full_like(loss, float(asked))])
        alike = loss[None] if sums is None else torch.cat([loss[None], sums])
        added = self._engine.add_up(alike, flags)
        total, (odd, stops), sums = added[0], added[-2:], added[1:-2]
        # The sum decides, not a process' own number: no two of them can differ.
        bad = (odd > 0) | total.isfinite().logical_not()
        if self._on_device:
            self._step_unless(bad)
        numbers = torch.cat([torch.stack([total, norm, stops, bad.to(total)]), sums]).tolist()
        loss_sum, grad_norm, asked_by, left_out, *measured = numbers
        if not self._on_device and not left_out:
            self._optimizer.step()
        self._settle(bad)
        finite = math.isfinite(loss_sum)
        return StepNumbers(loss_sum, grad_norm, finite, not left_out, asked_by > 0, tuple(measured))

    def _step_unless(self, bad: Tensor) -> None:
        optimizer = self._optimizer
        with torch._C.DisableTorchFunction():  # optimizers want it in single precision, also in verification
            optimizer.grad_scale, optimizer.found_inf = None, bad.float()  # type: ignore[attr-defined]
        try:
            optimizer.step()
        finally:
            del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]

    def _settle(self, bad: Tensor) -> None:
        """Puts the buffers back, and lets the loss scale shrink or grow by what all processes found."""
        for buffer, before in zip(self._buffers, self._before, strict=True):
            buffer.copy_(torch.where(bad.to(buffer.device), before, buffer))
        if self._scaler.is_enabled():
            for found in self._scaler._found_inf_per_device(self._optimizer).values():
                found.copy_(bad)
        self._scaler.update()
