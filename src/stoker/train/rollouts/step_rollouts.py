"""Lookup of the answers that a step trained on, from a run's folder and without its model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from stoker.errors import UserError
from stoker.job.resolved import ResolvedJob
from stoker.job.task_spec import TASKS
from stoker.runs.run_folder import RunFolder
from stoker.train.rollouts.policy_block import iteration_plan_of
from stoker.train.rollouts.rollout import Rollout
from stoker.train.rollouts.rollout_files import ROLLOUTS, Iteration, RolloutFiles


@dataclass(frozen=True)
class StepRollouts:
    """The answers that a step trained on, in sampling order.

    Attributes:
        iterations: their iterations, in order.
    """

    step: int
    iterations: tuple[Iteration, ...]
    rollouts: tuple[Rollout, ...]


def rollouts_of_step(folder: RunFolder, job: ResolvedJob, step: int | None = None) -> StepRollouts:
    """Returns the answers of a step.

    Args:
        step: the last one by default.

    Raises:
        UserError: the run trains no policy, or has no such step.
        RunFailed: the file of the answers is missing or damaged.
    """
    if not TASKS[job.task].rows.prompts:
        policies = " and ".join(f"`task: {name}`" for name, task in TASKS.items() if task.rows.prompts)
        raise UserError(f"{folder.path} trained by `task: {job.task}`; {policies} sample answers")
    consumed = _consumed(folder)
    if not consumed:
        raise UserError(f"{folder.path} has not taken a step yet")
    number = max(consumed) if step is None else step
    if number not in consumed:
        raise UserError(f"{folder.path} has no step {number}; it has {min(consumed)} to {max(consumed)}")
    files, plan = RolloutFiles(folder.path / ROLLOUTS), iteration_plan_of(job)
    first, last = consumed[number]
    if first is None:  # a run of an earlier version: samples before may be skipped
        first = max(consumed.get(number - 1, (0, 0))[1], last - job.train.batch)
    iterations, found = [], []
    while first < last:
        index, place = plan.place(first)
        end = min(last, first - place + plan.samples)
        iteration = files.read(index)
        iterations.append(iteration)
        found += [iteration.rollouts[i] for i in sorted(plan.chosen(first, end, len(iteration.rollouts)))]
        first = end
    return StepRollouts(number, tuple(iterations), tuple(found))


def _consumed(folder: RunFolder) -> dict[int, tuple[int | None, int]]:
    """Returns, by step, the number of its first sample, if known, and the samples consumed after it."""
    return {
        line["step"]: (first if _whole(first := line.get("first_sample")) else None, line["samples"])
        for line in folder.read_metrics()
        if _whole(line.get("step")) and _whole(line.get("samples"))
    }


def _whole(value: Any) -> bool:
    return type(value) is int and value >= 0
