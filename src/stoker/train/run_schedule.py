"""The numbers of a run: those derived before it starts, and those that change from step to step."""

from __future__ import annotations

from dataclasses import dataclass, field

from stoker.errors import UserError
from stoker.job.resolve import intervals
from stoker.job.resolved import ResolvedJob
from stoker.train.lr_schedule import Schedule, TwoStages, warmup_steps
from stoker.train.skipped_samples import end_of, steps_in
from stoker.train.task import Task


@dataclass(frozen=True)
class RunSchedule:
    """The numbers of a run, every one derived before it starts.

    Attributes:
        steps: optimizer steps in all.
        samples: samples in all; the last step may have fewer than ``batch``.
        batch, micro_batch: samples per optimizer step, and per forward pass.
        clip: largest gradient norm; 0 for none.
        seed: of everything random within a step.
        evaluate_every, save_every: in steps.
        keep: newest checkpoints kept.
        keep_every: also those of steps that this number divides; None for none.
        keep_best: whether the best one is kept beside them.
    """

    steps: int
    samples: int
    batch: int
    micro_batch: int
    clip: float
    seed: int
    evaluate_every: int
    save_every: int
    keep: int
    keep_every: int | None
    keep_best: bool


@dataclass
class Progress:
    """What changes from step to step beside the tensors, and is saved with them.

    Attributes:
        samples: number of the next one.
        trained: targets so far.
        left_out: steps whose numbers were not finite.
        skipped: spans of samples that training skips; see `stoker.train.skipped_samples`.
        recent: the losses that the next one is compared with.
    """

    step: int = 0
    samples: int = 0
    trained: int = 0
    first_loss: float | None = None
    last_loss: float | None = None
    best_loss: float | None = None
    best_step: int | None = None
    left_out: int = 0
    skipped: list[list[int]] = field(default_factory=list)
    recent: list[float] = field(default_factory=list)


def plan_of(job: ResolvedJob, task: Task, done: Progress | None = None) -> RunSchedule:
    """Every number of the run, derived from the resolved job and the size of its data.

    Args:
        done: what an earlier part of the run has done. Its last step may have been smaller than a batch, at
            the end of an epoch that was the last one then.

    Raises:
        UserError: the data gives not even one sample.
    """
    train = job.train
    done = done or Progress()
    if job.steps is not None:
        steps = job.steps
        samples = end_of(done.samples, max(0, steps - done.step), train.batch, done.skipped)
    else:
        samples = task.epoch_samples(job.epochs or 1.0)
        steps = done.step + steps_in(done.samples, samples, train.batch, done.skipped)
    if steps == 0:
        raise UserError("epochs: so small a part of the data holds no sample")
    every, save = intervals(steps, job.parallel.sync.every)
    return RunSchedule(
        steps,
        samples,
        train.batch,
        train.micro_batch,
        train.clip,
        job.seed,
        every if job.evaluate.every == "auto" else job.evaluate.every,
        save if job.checkpoint.every == "auto" else job.checkpoint.every,
        job.checkpoint.keep,
        job.checkpoint.keep_every,
        job.checkpoint.best,
    )


def schedule_of(job: ResolvedJob, plan: RunSchedule) -> Schedule:
    """The learning rate of each of the plan's steps."""
    first = min(job.tune.new_rows_first, plan.steps)
    rest = plan.steps - first
    warmup = warmup_steps(job.train.warmup, rest)
    return TwoStages(job.train.lr, rest, warmup, job.train.schedule, job.train.min_lr, first=first)
