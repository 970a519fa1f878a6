"""The objective and the target by which a run is measured on rows of data."""

from __future__ import annotations

from dataclasses import replace

from stoker.job.resolved import ResolvedJob
from stoker.job.task_spec import task_of, training_of
from stoker.models.objective import Objective, next_token
from stoker.train.language.language_training import LanguageTraining


def objective_of(job: ResolvedJob) -> Objective:
    """Returns the objective that measures a run on data rows: the task's, or next tokens where it trains on its own
    answers.
    """
    training = training_of(job)
    return training.objective(job) if training.objective and not task_of(job).rows.prompts else next_token


def measured_training(job: ResolvedJob) -> LanguageTraining:
    """Returns the task's training with the target of `objective_of`, which measures the tokens of data rows."""
    training = training_of(job)
    return replace(training, target="token", perplexity=True) if task_of(job).rows.prompts else training
