"""The loop: samples -> parts -> gradients -> step -> metrics, evaluation, checkpoints. One for every task."""

from __future__ import annotations

import math
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer

from stoker.checkpoint.store import DamagedError, State, Store
from stoker.checkpoint.weights import restore_weights, saved_buffers, trainable
from stoker.data.order import stream_key
from stoker.errors import RunFailed
from stoker.hardware.device import Device
from stoker.runs.folder import MetricsWriter, RunFolder, StepMetrics
from stoker.train.evaluate import Evaluation, evaluate
from stoker.train.optimizer import optimizer_tensors, restore_optimizer
from stoker.train.plan import Plan, Progress
from stoker.train.progress import Display
from stoker.train.schedule import Schedule
from stoker.train.task import Part, Task

SHOWN_ROWS = 16  # row numbers named when a batch is bad; all of them are in the event


@dataclass(frozen=True)
class Outcome:
    """How a run ended: ``done`` or ``stopped``, and where."""

    state: str
    step: int
    signal: int | None
    evaluation: Evaluation | None
    first_evaluation: float | None


class Loop:
    """A run of a task; `run` goes on from the newest checkpoint where there is one."""

    def __init__(
        self,
        task: Task,
        *,
        optimizer: Optimizer,
        schedule: Schedule,
        plan: Plan,
        device: Device,
        folder: RunFolder,
        store: Store,
        display: Display,
        on_step: Callable[[StepMetrics], None] = lambda _: None,
    ) -> None:
        self.task, self.optimizer, self.schedule, self.plan = task, optimizer, schedule, plan
        self.device, self.folder, self.store, self.display = device, folder, store, display
        self.on_step = on_step
        self.progress = Progress()
        self.scaler = torch.amp.GradScaler(device.type, enabled=device.precision == "fp16")
        self.parameters = list(trainable(task.model).values())
        self.writer: MetricsWriter | None = None
        self._signal: int | None = None

    def resume(self) -> int:
        """Restores the newest checkpoint, if any; says from which step the run goes on (0: from the start).

        A damaged one is put aside, and the one before it is taken.

        Raises:
            RunFailed: none of the checkpoints can be read.
        """
        steps = self.store.steps()
        for step in reversed(steps):
            try:
                state = self.store.load(step)
            except DamagedError as error:
                aside = self.store.put_aside(step)
                self.folder.event("damaged", step=step, error=str(error), aside=str(aside))
                self.display.note(f"{error}; it is now {aside.name}, and the one before it is taken")
            else:
                self._restore(state)
                return self.progress.step
        if steps:
            raise RunFailed(f"no checkpoint in {self.store.folder} can be read; to start anew write --fresh")
        return 0

    def run(self) -> Outcome:
        """Trains to the end, or until a signal asks to stop.

        Raises:
            RunFailed: the loss is not finite, or a checkpoint could not be written.
        """
        first = None
        with self._signals(), self.display:
            evaluation = None
            if self.progress.step == 0:
                evaluation = self._evaluate()
                first = evaluation.loss if evaluation else None
            self.writer = MetricsWriter(self.folder)
            try:
                while self.progress.step < self.plan.steps and self._signal is None:
                    metrics = self._step(self.progress.step + 1)
                    self.writer.write(metrics)
                    self.on_step(metrics)
                    self.display.step(metrics)
                    evaluation = self._after_step(self.progress.step) or evaluation
                if self.progress.step:
                    self._save()
            finally:
                self.writer.close()
            finished = self.progress.step >= self.plan.steps
        return Outcome("done" if finished else "stopped", self.progress.step, self._signal, evaluation, first)

    # -- one step ------------------------------------------------------------------------------------------

    def _step(self, step: int) -> StepMetrics:
        begin = time.perf_counter()
        self._seed(step)
        first, last = self._next_samples()
        micro_batches = [
            self.task.parts(i, min(i + self.plan.micro_batch, last)) for i in range(first, last, self.plan.micro_batch)
        ]
        parts = [part for micro_batch in micro_batches for part in micro_batch]
        # Normalised by the targets of the whole step: accumulation and padding cannot change the gradient.
        targets = max(1, sum(part.targets for part in parts))
        self.optimizer.zero_grad(set_to_none=True)
        total = torch.zeros((), dtype=torch.float64, device=self._metric_device)
        for part in parts:
            total += self._forward_backward(part, targets).to(total.device, total.dtype)
        lr = self.schedule.lr(step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.scaler.unscale_(self.optimizer)
        norm = self._clip()
        loss, grad_norm = float(total) / targets, float(norm)
        overflow = self.scaler.is_enabled() and not math.isfinite(grad_norm) and math.isfinite(loss)
        if not overflow and not (math.isfinite(loss) and math.isfinite(grad_norm)):
            self._fail(step, loss, grad_norm, first, last)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.progress.step, self.progress.samples = step, last
        self.progress.trained += targets
        self.progress.last_loss = loss
        self.progress.first_loss = self.progress.first_loss if self.progress.first_loss is not None else loss
        seconds = time.perf_counter() - begin
        tokens = sum(part.tokens for part in parts)
        return StepMetrics(
            step, loss, grad_norm, lr, tokens, targets, tokens / seconds, self.device.peak_memory(), seconds
        )

    def _next_samples(self) -> tuple[int, int]:
        first = self.progress.samples
        return first, min(first + self.plan.batch, self.plan.samples)

    def _forward_backward(self, part: Part, targets: int) -> torch.Tensor:
        with self.task.around(part):
            with self.device.autocast():
                loss = self.task.loss(part).total
            self.scaler.scale(loss / targets).backward()
        return loss.detach()

    def _clip(self) -> torch.Tensor:
        limit = self.plan.clip or math.inf
        return torch.nn.utils.clip_grad_norm_(self.parameters, limit)

    @property
    def _metric_device(self) -> torch.device:
        return torch.device("cpu" if self.device.type == "mps" else self.device.type)  # mps has no float64

    def _seed(self, step: int) -> None:
        """The random state is a function of (seed, step), so a resumed run draws the same numbers."""
        key = stream_key(self.plan.seed, 7, step)
        random.seed(key)
        np.random.seed(key % 2**32)
        torch.manual_seed(key % 2**63)

    def _fail(self, step: int, loss: float, grad_norm: float, first: int, last: int) -> None:
        rows = self.task.describe_samples(first, last)
        self.folder.event("not_finite", step=step, loss=str(loss), grad_norm=str(grad_norm), rows=rows)
        shown = ", ".join(rows[:SHOWN_ROWS]) + (f" and {len(rows) - SHOWN_ROWS} more" if len(rows) > SHOWN_ROWS else "")
        saved = self.store.steps()[-1:]
        back = f"the checkpoint of step {saved[0]} is untouched" if saved else "no checkpoint had been written"
        what = f"the loss is {loss}" if not math.isfinite(loss) else f"the gradient's norm is {grad_norm}"
        raise RunFailed(f"step {step}: {what}; the batch was {shown}; {back}. A lower train.lr often helps")

    # -- between steps -------------------------------------------------------------------------------------

    def _after_step(self, step: int) -> Evaluation | None:
        evaluation = None
        last = step == self.plan.steps
        if last or step % self.plan.evaluate_every == 0:
            evaluation = self._evaluate()
        if step % self.plan.save_every == 0 or (self.plan.keep_best and self.progress.best_step == step):
            self._save()
        return evaluation

    def _evaluate(self) -> Evaluation | None:
        begin = time.perf_counter()
        evaluation = evaluate(self.task, self.device)
        if evaluation is None:
            return None
        step = self.progress.step
        if step and (self.progress.best_loss is None or evaluation.loss < self.progress.best_loss):
            self.progress.best_loss, self.progress.best_step = evaluation.loss, step
        self.folder.event(
            "evaluated",
            step=step,
            loss=evaluation.loss,
            perplexity=evaluation.perplexity,
            accuracy=evaluation.accuracy,
            targets=evaluation.targets,
            seconds=round(time.perf_counter() - begin, 3),
        )
        self.display.evaluated(step, evaluation)
        return evaluation

    def _save(self) -> None:
        if self.progress.step in self.store.steps():
            return
        if self.writer is not None:
            self.writer.flush()
        seconds = self.store.save(self._state())
        self.store.retain(self.plan.keep, self.progress.best_step if self.plan.keep_best else None)
        self.folder.event("saved", step=self.progress.step, seconds=round(seconds, 3))

    def _state(self) -> State:
        model = {f"model/{name}": p.detach() for name, p in trainable(self.task.model).items()}
        buffers = {f"buffer/{name}": b for name, b in saved_buffers(self.task.model).items()}
        tensors, numbers = optimizer_tensors(self.task.model, self.optimizer)
        return State(
            self.progress.step,
            {**model, **buffers, **{f"optimizer/{name}": t for name, t in tensors.items()}},
            {"progress": vars(self.progress), "optimizer": numbers, "scaler": self.scaler.state_dict()},
        )

    def _restore(self, state: State) -> None:
        restore_weights(self.task.model, state)
        moments = {k.removeprefix("optimizer/"): t for k, t in state.tensors.items() if k.startswith("optimizer/")}
        restore_optimizer(self.task.model, self.optimizer, moments, state.numbers["optimizer"])
        self.scaler.load_state_dict(state.numbers["scaler"])
        self.progress = Progress(**state.numbers["progress"])

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """The first SIGINT or SIGTERM ends the run after its step, with a checkpoint; a second at once."""

        def ask(number: int, _: Any) -> None:
            if self._signal is not None:
                raise KeyboardInterrupt
            self._signal = number
            self.display.note("stopping after this step ... (once more to stop at once, without a checkpoint)")

        try:
            before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
        except ValueError:  # not the main thread: whoever runs us there handles signals
            before = {}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
