"""The training loop, the same for every task: step, metrics, evaluation, checkpoint."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from textwrap import shorten
from typing import NoReturn

import torch
from torch.optim import Optimizer

from stoker.checkpoint.object_collectives import by_first, run_on_all_ranks
from stoker.checkpoint.retention import Keep
from stoker.checkpoint.run_weights import saved_buffers
from stoker.checkpoint.saver import Saver
from stoker.checkpoint.state import State, Where
from stoker.errors import CodeFailed, DiskFailed, RunFailed, placed_errors
from stoker.node_cache.job_urls import urls_of
from stoker.resilience.deadline import exit_code
from stoker.resilience.heartbeat import Heart
from stoker.runs.run_folder import RunFolder
from stoker.runs.step_metrics import StepMetrics
from stoker.train.batches import Batches
from stoker.train.display import Display
from stoker.train.evaluate import Evaluation
from stoker.train.faults.anomaly_policy import AnomalyPolicy, in_event
from stoker.train.faults.skipped_samples import Span, next_span
from stoker.train.faults.stop_request import StopRequest
from stoker.train.hooks import Hook
from stoker.train.language.sample_answers import Sampler
from stoker.train.prepared import Prepared
from stoker.train.records.metrics_log import MetricsLog
from stoker.train.records.resume_check import check_none_lost
from stoker.train.records.run_cache_stats import RunCacheStats
from stoker.train.run_result import RunResult
from stoker.train.run_schedule import Progress, length_of, schedule_of
from stoker.train.step import Stepper, StepResult
from stoker.train.training_state import FurtherState, TrainingState

EVENTS = {"skip": "skipped", "overflow": "overflow", "back": "spike"}
WENT_ON = {
    "skip": "the step is left out",
    "overflow": "the step is left out, and the loss scale is halved",
    "back": "there is no checkpoint to go back to",
}
LEFT_OUT = "the layout lacks islands of this state: what they learnt since the last synchronisation is lost"
FORGETS = "PowerSGD's state is of another layout: its errors are dropped, and the next steps are exact"


class Loop:
    """Trains a prepared job from the state restored by `resume`, or from the start.

    Args:
        event: records an event of the run, with its values.
        further: state in checkpoints beside weights and moments.

    Attributes:
        evaluation: evaluation of the current weights; None if they were not evaluated.
    """

    def __init__(
        self,
        prepared: Prepared,
        folder: RunFolder,
        *,
        optimizer: Optimizer,
        saver: Saver,
        display: Display,
        event: Callable[..., None],
        heart: Heart,
        sampler: Sampler | None,
        further: Sequence[FurtherState],
        hooks: Sequence[Hook],
    ) -> None:
        job, task, engine, device = prepared.job, prepared.task, prepared.engine, prepared.device
        self._job, self.task, self.engine, self.optimizer = job, task, engine, optimizer
        self.folder, self.saver, self.display = folder, saver, display
        self.store, self._event = saver.store, event
        self.sampler, self.hooks = sampler, list(hooks)
        if engine.first:
            task.note = display.note
        self._reads_urls = bool(urls_of(job))
        self.progress = Progress()
        self._derive_length()
        scaler = torch.amp.GradScaler(device.type, enabled=device.precision == "fp16")
        self.state = TrainingState(
            task.model,
            optimizer,
            scaler,
            shards=prepared.shards,
            further=further,
            island=(prepared.mesh.at("island"), prepared.mesh.layout.islands) if prepared.mesh else (0, 1),
        )
        # A run that stops at a non-finite step need not restore its buffers.
        buffers = [] if job.faults.not_finite == "stop" else list(saved_buffers(task.model))
        self.batches = Batches(task, engine, device.torch, batch=job.train.batch, micro_batch=job.train.micro_batch)
        self.stepper = Stepper(
            task,
            self.batches,
            optimizer=optimizer,
            scaler=scaler,
            engine=engine,
            buffers=lambda: [task.model.get_buffer(name) for name in buffers],
            beat=heart.beat,
            hooks=self.hooks,
            seed=job.seed,
            clip=job.train.clip,
        )
        self.anomalies = AnomalyPolicy(job.faults)
        self.heart = heart
        self.metrics = MetricsLog(folder, device)
        self.stop = StopRequest(faults=job.faults, heart=heart, display=display)
        self._stop = False  # whether any process received a signal
        self.resumed_from: Where | None = None
        self.evaluation: Evaluation | None = None

    def _derive_length(self) -> None:
        """Derives the remaining steps and their learning rates from the progress so far."""
        self.length = length_of(self._job, self.task, self.progress)
        self.schedule = schedule_of(self._job, self.length.steps)
        self.display.steps = self.length.steps

    def resume(self) -> int:
        """Restores the newest state, from memory or from disk; returns its step, 0 if there is none.

        A damaged checkpoint is set aside, and the one before it is restored.

        Raises:
            RunFailed: none of the checkpoints can be read, or all have been removed.
        """
        self.task.begin(self.engine, self.folder, self.optimizer)
        if self._restore():
            self._derive_length()
            return self.progress.step
        by_first(lambda: check_none_lost(self.folder, self.store.folder))
        return 0

    def save_what_was_kept(self) -> None:
        """Writes a state that was restored from memory to disk."""
        if self.resumed_from == "memory":
            with self.saver:
                self._finish()

    def _finish(self) -> None:
        self.saver.finish(self._state(), self._keep(), lambda: self.state.now(self.progress))

    def _restore(self, before: int | None = None) -> bool:
        """Restores the newest state, or the newest before a step; returns whether there was one."""
        restored = self.saver.restore_newest(self.state.places, before=before)
        if restored is None:
            return False
        self.progress = self.state.restored(restored.numbers)
        if self.state.left_out:
            self.display.note(f"{self.state.left_out} {LEFT_OUT}")
        if self.state.forgets:
            self.display.note(FORGETS)
        self.resumed_from = restored.where
        return True

    def run(self) -> RunResult:
        """Trains to the end, or until a signal asks to stop.

        Raises:
            RunFailed: the loss is not finite, or a checkpoint could not be written.
        """
        with self.stop.heard(), self.display, self.saver, self.batches:
            if self.progress.step == 0:
                self._evaluate()
            self.metrics.cache = RunCacheStats() if self._reads_urls else None
            if self.engine.first:
                self.metrics.open()
            try:
                while self.progress.step < self.length.steps and not self._stop:
                    if self.progress.evaluation_due:
                        self._evaluate()
                        continue
                    self.evaluation = None
                    metrics = self._step(self.progress.step + 1)
                    if metrics is None:
                        continue
                    for hook in self.hooks:
                        hook.after_step(metrics)
                    self.display.step(metrics)
                    self._after_step(self.progress.step)
                for hook in self.hooks:
                    hook.after_run()
                finished = self.progress.step >= self.length.steps
                paused = not finished and all(number is None for number in run_on_all_ranks(lambda: self.stop.signal))
                if self.progress.step:
                    self._begin_save()
                    if paused:
                        self.saver.pause(self.state.now(self.progress), self._keep())
                    else:
                        self._finish()
            finally:
                self.metrics.close()
        return self.result("done" if finished else "paused" if paused else "stopped")

    def result(self, state: str) -> RunResult:
        """Returns the result of a run that ends in a state."""
        done, number = self.progress, self.stop.signal
        return RunResult(
            state=state,
            step=done.step,
            steps=self.length.steps,
            signal=number,
            first_loss=done.first_loss,
            last_loss=done.last_loss,
            held_out_before=done.first_held_out,
            held_out=self.evaluation.loss if self.evaluation else None,
            best_loss=done.best_loss,
            best_step=done.best_step,
            keep_best=self._job.checkpoint.best,
            exit_code=0 if state == "done" else exit_code(number or 0, self._job.faults),
        )

    def _step(self, step: int) -> StepMetrics | None:
        """Takes one step; returns None if it failed and an earlier state was restored."""
        result = self._take(step)
        answer = self.anomalies.answer(result, self.progress.recent)
        if answer == "again":
            self._event("not_finite", **in_event(result), rows=self._rows(result))
            result = self._take(step)
            answer = self.anomalies.answer(result, self.progress.recent, is_retry=True)
        if answer == "stop":
            self._fail(result, "not_finite")
        if answer == "back":  # may wait for a pending checkpoint, and read one
            self.heart.beat("save", self.progress.step)
        if answer == "back" and (result.wrong or self.saver.has_state()):
            self._go_back(result)
            return None
        if answer != "fine":
            self._event(EVENTS[answer], **in_event(result), rows=self._rows(result))
            self.display.note(f"step {step}: {self.anomalies.why(result, self.progress.recent)}; {WENT_ON[answer]}")
        self._advance(result)
        stall, self.saver.stall = self.saver.stall, 0.0
        samples = self.progress.samples
        return self.metrics.add(result, samples=samples, stall=stall)

    def _take(self, step: int) -> StepResult:
        span = self._span(self.progress.samples)
        following = [self._span(span[1])] if step < self.length.steps else []
        if step + 1 < self.length.steps:
            following.append(self._span(following[0][1]))
        self.heart.beat("rollouts", step)
        self._alarm(step, self.task.reach(*span, step, self.engine))
        lr = self.schedule.lr(step)
        with placed_errors(lambda problem: replace(problem, message=f"step {step}: {problem.message}"), CodeFailed):
            result = self.stepper.take(step, span, following, lr=lr, asked=self.stop.is_made)
        self._stop = result.asked
        self._alarm(step, [*result.alarms, *self.task.judge(result.measures)])
        return result

    def _alarm(self, step: int, found: Sequence[str]) -> None:
        for what in found:
            self._event("alarm", step=step, what=what)
            self.display.note(f"step {step}: {what}")

    def _span(self, first: int) -> Span:
        """Returns the samples of the step that begins at ``first``, or later if samples are skipped."""
        first, last = next_span(first, self._job.train.batch, self.progress.skipped)
        return first, min(last, self.length.samples)

    def _advance(self, result: StepResult) -> None:
        done = self.progress
        done.step, done.samples = result.step, result.span[1]
        if not result.taken:
            done.left_out += 1
            return
        done.trained += result.counts.targets
        done.last_loss = result.loss
        done.first_loss = done.first_loss if done.first_loss is not None else result.loss
        done.recent = self.anomalies.remembered(done.recent, result)

    def _go_back(self, result: StepResult) -> None:
        """Restores the newest state before a failed step, whose samples are skipped from then on.

        If that does not help, the next rollback goes further back, where there is an older state, and skips all samples
        since. Without a state the current weights are kept, as no such step has changed them.
        """
        begin = time.perf_counter()
        why, before = self.anomalies.why(result, self.progress.recent), self.anomalies.goes_back_before(result.step)
        if before is None:
            self._fail(result, "gave_up")
        skipped = self.progress.skipped
        further = before < result.step and self._restore(before)
        if not further:
            self._restore(result.step)
        first, last = self.progress.samples if further else result.span[0], result.span[1]
        self.progress.skipped = [*skipped, [first, last]]
        self._derive_length()
        back = self.progress.step
        self.anomalies.went_back(result.step, back)
        self.metrics.go_back(back)
        rows, seconds = self.task.describe_samples(first, last), round(time.perf_counter() - begin, 3)
        self._event("rolled_back", **{"from": result.step, "to": back}, why=why, rows=rows, seconds=seconds)
        samples = f"{last - first} sample{'s' * (last - first != 1)}"
        self.display.note(f"step {result.step}: {why}; restored step {back}, {samples} skipped")

    def _rows(self, result: StepResult) -> list[str]:
        return self.task.describe_samples(*result.span)

    def _fail(self, result: StepResult, event: str) -> NoReturn:
        rows = self._rows(result)
        self._event(event, **in_event(result), rows=rows)
        self.heart.beat("save", self.progress.step)
        self.saver.wait()
        self.saver.report()
        try:
            saved = self.store.steps()[-1:]
            back = f"the checkpoint of step {saved[0]} is untouched" if saved else "no checkpoint had been written"
        except DiskFailed:
            back = f"{self.store.folder}, where the checkpoints are, cannot be used"
        why = self.anomalies.failure(result, self.progress.recent, rows)
        raise RunFailed(f"{why}; {back}. A lower train.lr often helps")

    def _after_step(self, step: int) -> None:
        copy = self.saver.cadence.due(step)
        last = step == self.length.steps
        if last or step % self.length.evaluate_every == 0:
            if self._stop and not last:  # an evaluation may take long, and whoever stops a run waits for its end
                self.progress.evaluation_due = True
                self.display.note(f"step {step}: its evaluation is left to the next start of the run")
            else:
                self._evaluate()
        due = step % self.length.save_every == 0 or (self._job.checkpoint.best and self.progress.best_step == step)
        if due and not last:  # the last state is saved at the end
            self._begin_save()
            self.saver.attempt(self._state(), self._keep())
        elif copy and not last:
            self.saver.remember(self.state.now(self.progress))
        self.saver.report()
        self.saver.cadence.begin_step()

    def _evaluate(self) -> None:
        begin = time.perf_counter()
        self.heart.beat("evaluate", self.progress.step)
        evaluation = self.evaluation = self.task.evaluate(self.engine)
        self.progress.evaluation_due = False
        if evaluation is None:
            return
        step = self.progress.step
        self._remember(evaluation)
        numbers = {name: getattr(evaluation, name) for name in ("loss", "perplexity", "accuracy", "targets")}
        numbers |= evaluation.measures
        self._event("evaluated", step=step, **numbers, seconds=round(time.perf_counter() - begin, 3))
        for hook in self.hooks:
            hook.evaluated(step, numbers)
        self.display.evaluated(step, evaluation)
        if self.sampler is not None:
            samples = self.sampler.samples(self.task, self.engine)
            self._event("sampled", step=step, samples=[asdict(sample) for sample in samples])
            for sample in samples:
                self.display.note(f"  {shorten(sample.prompt, 60)} -> {shorten(sample.answer, 120)}")
        self._stop = any(run_on_all_ranks(self.stop.is_made))  # without a further step

    def _remember(self, evaluation: Evaluation) -> None:
        done, best = self.progress, self.progress.best_loss
        if best is not None and not math.isfinite(best):  # saved by an earlier version
            best = None
        if done.best_targets not in (None, evaluation.targets):  # the mean over other rows
            best = None
        if done.step == 0:
            done.first_held_out, done.first_targets = evaluation.loss, evaluation.targets
        elif done.first_targets != evaluation.targets:
            done.first_held_out = None
        if done.step and math.isfinite(evaluation.loss) and (best is None or evaluation.loss < best):
            done.best_loss, done.best_step, done.best_targets = evaluation.loss, done.step, evaluation.targets

    def _begin_save(self) -> None:
        self.heart.beat("save", self.progress.step)
        self.metrics.flush()

    def _state(self) -> State:
        """Returns the state to save in a checkpoint."""
        return self.state.now(self.progress, self.saver.is_whole)

    def _keep(self) -> Keep:
        best = self.progress.best_step if self._job.checkpoint.best else None
        return Keep(self._job.checkpoint.keep, self._job.checkpoint.keep_every, best)
