"""The objective and the target by which a run is measured on rows of data."""

from __future__ import annotations

from dataclasses import replace

from stoker.job.resolved import ResolvedJob
from stoker.job.task_spec import TaskSpec, task_of
from stoker.models.objective import Objective, next_token


def objective_of(job: ResolvedJob) -> Objective:
    """Returns the objective that measures a run on data rows: the task's, or next tokens where it trains on its own
    answers.
    """
    task = task_of(job)
    return task.objective(job) if task.objective and not task.prompts else next_token


def measured_spec(job: ResolvedJob) -> TaskSpec:
    """Returns the job's task with the target of `objective_of`, which measures the tokens of data rows."""
    task = task_of(job)
    return replace(task, target="token", perplexity=True) if task.prompts else task
