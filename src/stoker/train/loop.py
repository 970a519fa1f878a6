"""The loop: samples -> parts -> gradients -> step -> metrics, evaluation, checkpoints. One for every task."""

from __future__ import annotations

import math
import random
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from textwrap import shorten
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer

from stoker.checkpoint.chunks import Held
from stoker.checkpoint.store import DamagedError, Saved, State, Store
from stoker.checkpoint.weights import NONE, held_weights
from stoker.data.order import stream_key
from stoker.errors import RunFailed
from stoker.hardware.device import Device
from stoker.parallel.pieces import Piece
from stoker.runs.folder import MetricsWriter, RunFolder, StepMetrics
from stoker.train.evaluate import Evaluation, evaluate
from stoker.train.optimizer import empty_moments, held_moments
from stoker.train.passes import Passes
from stoker.train.plan import Plan, Progress
from stoker.train.progress import Display
from stoker.train.samples import Sampler
from stoker.train.schedule import Schedule
from stoker.train.task import Task

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
        passes: Passes,
        sampler: Sampler | None = None,
        pieces: Mapping[str, Piece] = NONE,
        aliases: Mapping[str, str] = NONE,
        on_step: Callable[[StepMetrics], None] = lambda _: None,
    ) -> None:
        self.task, self.optimizer, self.schedule, self.plan = task, optimizer, schedule, plan
        self.device, self.folder, self.store, self.display = device, folder, store, display
        self.passes, self.sampler, self.on_step = passes, sampler, on_step
        self._names = (pieces, aliases)
        self.progress = Progress()
        self.scaler = torch.amp.GradScaler(device.type, enabled=device.precision == "fp16")
        self.writer: MetricsWriter | None = None
        self._signal: int | None = None
        self._stop = False  # whether any process got a signal

    def resume(self) -> int:
        """Restores the newest checkpoint, if any; says from which step the run goes on (0: from the start).

        A damaged one is put aside, and the one before it is taken.

        Raises:
            RunFailed: none of the checkpoints can be read.
        """
        steps = self.store.steps()
        for step in reversed(steps):
            try:
                numbers = self.store.restore(step, self._places)
            except DamagedError as error:
                aside = self.store.put_aside(step)
                self._event("damaged", step=step, error=str(error), aside=str(aside))
                self.display.note(f"{error}; it is now {aside.name}, and the one before it is taken")
            else:
                self.scaler.load_state_dict(numbers["scaler"])
                self.progress = Progress(**numbers["progress"])
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
            self.writer = MetricsWriter(self.folder) if self.passes.first else None
            try:
                while self.progress.step < self.plan.steps and not self._stop:
                    metrics = self._step(self.progress.step + 1)
                    if self.writer is not None:
                        self.writer.write(metrics)
                    self.on_step(metrics)
                    self.display.step(metrics)
                    evaluation = self._after_step(self.progress.step) or evaluation
                if self.progress.step:
                    self._save()
            finally:
                if self.writer is not None:
                    self.writer.close()
            finished = self.progress.step >= self.plan.steps
        return Outcome("done" if finished else "stopped", self.progress.step, self._signal, evaluation, first)

    # -- one step ------------------------------------------------------------------------------------------

    def _step(self, step: int) -> StepMetrics:
        begin = time.perf_counter()
        self._seed(step)
        first, last = self._next_samples()
        mine = self.passes.share(first, last, self.plan.batch)
        micro_batches = [
            self.task.parts(i, min(i + self.plan.micro_batch, mine[1])) for i in range(*mine, self.plan.micro_batch)
        ]
        parts = [part for micro_batch in micro_batches for part in micro_batch]
        # Normalised by the targets of the whole step: accumulation, processes and padding cannot change the gradient.
        counts = self.passes.count(parts)
        self.optimizer.zero_grad(set_to_none=True)
        total = self.passes.train(parts, counts, self.scaler)
        lr = self.schedule.lr(step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.scaler.unscale_(self.optimizer)
        norm = self.passes.clip(self.plan.clip)
        summed, stops = self.passes.total(float(total), float(self._signal is not None))
        self._stop = stops > 0
        loss, grad_norm = summed / max(1, counts.targets), float(norm)
        overflow = self.scaler.is_enabled() and not math.isfinite(grad_norm) and math.isfinite(loss)
        if not overflow and not (math.isfinite(loss) and math.isfinite(grad_norm)):
            self._fail(step, loss, grad_norm, first, last)
        if overflow:  # the norm is that of all processes, so all of them leave this step out
            self.scaler.update(self.scaler.get_scale() * self.scaler.get_backoff_factor())
        else:
            self.optimizer.step()
            self.scaler.update()
        self.progress.step, self.progress.samples = step, last
        self.progress.trained += counts.targets
        self.progress.last_loss = loss
        self.progress.first_loss = self.progress.first_loss if self.progress.first_loss is not None else loss
        seconds = time.perf_counter() - begin
        return StepMetrics(
            step,
            loss,
            grad_norm,
            lr,
            counts.tokens,
            counts.targets,
            counts.tokens / seconds,
            self.device.peak_memory(),
            seconds,
        )

    def _next_samples(self) -> tuple[int, int]:
        first = self.progress.samples
        return first, min(first + self.plan.batch, self.plan.samples)

    def _seed(self, step: int) -> None:
        """The random state is a function of (seed, step, process), so a resumed run draws the same numbers."""
        seat = self.passes.seat()
        key = stream_key(self.plan.seed, 7, step, *([seat] if seat else []))
        random.seed(key)
        np.random.seed(key % 2**32)
        torch.manual_seed(key % 2**63)

    def _fail(self, step: int, loss: float, grad_norm: float, first: int, last: int) -> None:
        rows = self.task.describe_samples(first, last)
        self._event("not_finite", step=step, loss=str(loss), grad_norm=str(grad_norm), rows=rows)
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
        evaluation = evaluate(self.task, self.passes)
        if evaluation is None:
            return None
        step = self.progress.step
        if step and (self.progress.best_loss is None or evaluation.loss < self.progress.best_loss):
            self.progress.best_loss, self.progress.best_step = evaluation.loss, step
        self._event(
            "evaluated",
            step=step,
            loss=evaluation.loss,
            perplexity=evaluation.perplexity,
            accuracy=evaluation.accuracy,
            targets=evaluation.targets,
            seconds=round(time.perf_counter() - begin, 3),
        )
        self.display.evaluated(step, evaluation)
        if self.sampler is not None:
            self._write_samples(self.sampler)
        return evaluation

    def _write_samples(self, sampler: Sampler) -> None:
        samples = sampler.samples(self.task, self.passes)
        self._event("sampled", step=self.progress.step, samples=[asdict(sample) for sample in samples])
        for sample in samples:
            self.display.note(f"  {shorten(sample.prompt, 60)} -> {shorten(sample.answer, 120)}")

    def _save(self) -> None:
        if self.progress.step in self.store.steps():
            return
        if self.writer is not None:
            self.writer.flush()
        seconds = self.store.save(self._state())
        self.store.retain(self.plan.keep, self.progress.best_step if self.plan.keep_best else None)
        self._event("saved", step=self.progress.step, seconds=round(seconds, 3))

    def _event(self, name: str, **values: Any) -> None:
        """Records what happened, once for all processes."""
        if self.passes.first:
            self.folder.event(name, **values)

    def _state(self) -> State:
        return State(
            self.progress.step,
            {
                **held_weights(self.task.model, *self._names),
                **held_moments(self.task.model, self.optimizer, *self._names),
            },
            {"progress": vars(self.progress), "scaler": self.scaler.state_dict()},
        )

    def _places(self, saved: Mapping[str, Saved]) -> Held:
        """Where a checkpoint's tensors go."""
        return {
            **held_weights(self.task.model, *self._names),
            **empty_moments(self.task.model, self.optimizer, saved, *self._names),
        }

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
