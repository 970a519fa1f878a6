"""One optimizer step: samples, micro-batches, gradients, and the update where all numbers are finite."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

from stoker.data.order import stream_key
from stoker.train.batches import Batches
from stoker.train.engine import Counts, Engine
from stoker.train.hooks import Hook
from stoker.train.optim.low_precision_adamw import LowPrecisionAdamW
from stoker.train.optim.optimizer import set_rate
from stoker.train.run_schedule import RunSchedule
from stoker.train.skipped_samples import Span
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
        """Takes one step on the samples of ``span``.

        Args:
            following: samples of the next steps, the first of which are laid out meanwhile; empty at the last step.
            asked: returns whether this process has been asked to stop.
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
        norm = self._engine.clip(plan.clip)
        measures = self._task.measures
        sums = measures.take(total) if measures is not None else None
        found = self._guard.step(total, norm, sums, asked=asked())
        if not found.taken and self._engine.power_sgd is not None:
            self._engine.power_sgd.undo()
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
            wrong=self._is_wrong(found),
            asked=found.asked,
            data_seconds=data_seconds,
            seconds=time.perf_counter() - begin,
            measures={
                **(measures.means(found.sums, counts.targets) if measures is not None else {}),
                **self._task.figures,
            },
            alarms=alarms,
        )

    def _is_wrong(self, found: StepNumbers) -> bool:
        if found.taken:
            return False
        overflow = self._scaler.is_enabled() and math.isfinite(found.loss)
        return not overflow or self._scaler.get_scale() < LEAST_SCALE

    def _seed(self, seed: int, step: int) -> None:
        """Seeds the random state from (seed, step, process), so that a resumed run draws the same numbers."""
        seat = self._engine.seat()
        key = stream_key(seed, 7, step, *([seat] if seat else []))
        random.seed(key)
        np.random.seed(key % 2**32)
        torch.manual_seed(key % 2**63)


@dataclass(frozen=True)
class StepNumbers:
    """Numbers that the host reads from the device after a step has been launched.

    Attributes:
        loss: summed over the step's targets and the processes.
        grad_norm: L2 norm of the gradient before clipping.
        taken: whether loss and gradient were finite, so that the step was taken.
        asked: whether a process was asked to stop.
        sums: further measures, summed over the step's targets and the processes.
    """

    loss: float
    grad_norm: float
    taken: bool
    asked: bool
    sums: tuple[float, ...]


class NonfiniteGuard:
    """Skips every step whose loss or gradient is not finite on any process.

    Weights, moments and buffers then keep their values bitwise. A fused AdamW, and one with low-precision moments, gets
    a flag on its device, as `torch.amp.GradScaler` passes it an overflow: the host waits once a step, after all of it
    has been launched. Other optimizers take no flag; for them the host waits before the step, and also for those that
    step on the host, which could read a flag before the device has written it.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        scaler: torch.amp.GradScaler,
        engine: Engine,
        buffers: Callable[[], Sequence[Tensor]] = tuple,
    ) -> None:
        """
        Args:
            buffers: returns the buffers that forward passes change or replace (batch norm's averages), which are
                restored after a skipped step.
        """
        self._optimizer, self._scaler, self._engine, self._buffers = optimizer, scaler, engine, buffers
        fused = isinstance(optimizer, AdamW) and bool(optimizer.defaults.get("fused"))
        self._takes_flag = fused or isinstance(optimizer, LowPrecisionAdamW)
        self._before: list[Tensor] = []

    def begin(self) -> None:
        """Saves the buffers; called before the forward passes."""
        self._before = [buffer.clone() for buffer in self._buffers()]

    @torch.no_grad()
    def step(self, loss: Tensor, norm: Tensor, sums: Tensor | None = None, *, asked: bool) -> StepNumbers:
        """Takes or skips the optimizer's step.

        Args:
            loss: summed loss of this process.
            norm: norm of the gradient over all processes.
            sums: further measures of this process, shape (measures,).
            asked: whether this process was asked to stop.
        """
        norm = norm.to(loss)
        flags = torch.stack([norm.isfinite().logical_not().to(loss), torch.full_like(loss, float(asked))])
        alike = loss[None] if sums is None else torch.cat([loss[None], sums])
        added = self._engine.add_up(alike, flags)
        total, (odd, stops), sums = added[0], added[-2:], added[1:-2]
        # The sum decides instead of a process' own number, so that all decide alike.
        bad = (odd > 0) | total.isfinite().logical_not()
        on_device = self._takes_flag and all(p.device == bad.device for p in self._parameters())
        if on_device:
            self._step_unless(bad)
        numbers = torch.cat([torch.stack([total, norm, stops, bad.to(total)]), sums]).tolist()
        loss_sum, grad_norm, asked_by, left_out, *measured = numbers
        if not on_device and not left_out:
            self._optimizer.step()
        if on_device and left_out and isinstance(self._optimizer, LowPrecisionAdamW):
            self._optimizer.count_back()
        self._settle(bad)
        return StepNumbers(loss_sum, grad_norm, not left_out, asked_by > 0, tuple(measured))

    def _parameters(self) -> Iterator[Tensor]:
        return (parameter for group in self._optimizer.param_groups for parameter in group["params"])

    def _step_unless(self, bad: Tensor) -> None:
        optimizer = self._optimizer
        with torch._C.DisableTorchFunction():  # optimizers need single precision, in verification too
            optimizer.grad_scale, optimizer.found_inf = None, bad.float()  # type: ignore[attr-defined]
        try:
            optimizer.step()
        finally:
            del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]

    def _settle(self, bad: Tensor) -> None:
        """Restores the buffers after a skipped step, and updates the loss scale from the result of all processes."""
        for buffer, before in zip(self._buffers(), self._before, strict=True):
            buffer.copy_(torch.where(bad.to(buffer.device), before, buffer))
        if self._scaler.is_enabled():
            for found in self._scaler._found_inf_per_device(self._optimizer).values():
                found.copy_(bad)
        self._scaler.update()
