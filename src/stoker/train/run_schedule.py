"""Numbers of a run: those derived before it starts, and those that change from step to step."""

from __future__ import annotations

from dataclasses import dataclass, field

from stoker.errors import Problem, UserError
from stoker.job.resolution.resolve import intervals
from stoker.job.resolved import ResolvedJob
from stoker.train.faults.skipped_samples import end_of, steps_in
from stoker.train.optim.lr_schedule import Schedule, warmup_steps
from stoker.train.task import Task


@dataclass(frozen=True)
class RunLength:
    """Length of a run, and the intervals that depend on it.

    Attributes:
        steps: total optimizer steps.
        samples: total samples; the last step may have fewer than a batch.
        evaluate_every, save_every: intervals in steps.
    """

    steps: int
    samples: int
    evaluate_every: int
    save_every: int


@dataclass
class Progress:
    """Non-tensor state that changes from step to step and is saved with the tensors.

    Attributes:
        samples: number of the next sample.
        trained: targets trained so far.
        first_held_out, first_targets: held-out loss before the first step, and its number of targets; no loss if the
            held-out rows have changed since.
        best_targets: number of held-out targets of ``best_loss``; None if an earlier version saved it.
        left_out: steps that were skipped because of numbers that are not finite.
        skipped: spans of samples that training skips; see `stoker.train.faults.skipped_samples`.
        recent: losses that the next one is compared with.
        evaluation_due: whether the run was stopped before the evaluation of ``step``.
    """

    step: int = 0
    samples: int = 0
    trained: int = 0
    first_loss: float | None = None
    last_loss: float | None = None
    first_held_out: float | None = None
    first_targets: int | None = None
    best_loss: float | None = None
    best_step: int | None = None
    best_targets: int | None = None
    left_out: int = 0
    skipped: list[list[int]] = field(default_factory=list)
    recent: list[float] = field(default_factory=list)
    evaluation_due: bool = False


def length_of(job: ResolvedJob, task: Task, done: Progress | None = None) -> RunLength:
    """Derives the length of the run from the resolved job and the size of its data.

    Args:
        done: progress of an earlier part of the run. Its last step may have been smaller than a batch, at what was then
            the end of its last epoch.

    Raises:
        UserError: the data gives no sample.
    """
    batch, done = job.train.batch, done or Progress()
    if job.steps is not None:
        steps = job.steps
        samples = end_of(done.samples, max(0, steps - done.step), batch, done.skipped)
    else:
        samples = task.epoch_samples(job.epochs or 1.0)
        steps = done.step + steps_in(done.samples, samples, batch, done.skipped)
    if steps == 0:
        raise UserError("epochs: this part of the data is less than one sample")
    every, save = intervals(steps, job.parallel.sync.every)
    return RunLength(
        steps=steps,
        samples=samples,
        evaluate_every=every if job.evaluate.every == "auto" else job.evaluate.every,
        save_every=save if job.checkpoint.every == "auto" else job.checkpoint.every,
    )


def memory_interval(job: ResolvedJob) -> int | None:
    """Returns the steps between copies of the state in host memory: 0 for none, None if their cost decides."""
    if job.checkpoint.memory != "auto":
        return job.checkpoint.memory
    return None if job.faults.restarts else 0


def schedule_of(job: ResolvedJob, steps: int) -> Schedule:
    """Returns the learning-rate schedule of a run of ``steps``."""
    first = min(job.tune.new_rows_first, steps)
    rest = steps - first
    warmup = warmup_steps(job.train.warmup, rest)
    return Schedule(job.train.lr, rest, warmup, job.train.schedule, job.train.min_lr, first=first)


def warmup_problem(job: ResolvedJob, steps: int) -> Problem | None:
    """Returns the problem of a warm-up that never ends: it begins again after `tune.new_rows_first`; else None."""
    warmup, first = job.train.warmup, min(job.tune.new_rows_first, steps)
    rest = steps - first or first
    if not isinstance(warmup, int) or warmup < rest:
        return None
    after = " after `tune.new_rows_first`" if rest != steps else ""
    message = f"`train.warmup` of {warmup} steps never ends within the run's {rest} steps{after}"
    return Problem(message, f"write at most {rest - 1}, or a fraction such as 0.1", key="train.warmup")
