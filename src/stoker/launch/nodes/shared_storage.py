"""Whether the run's folder must be on storage that all nodes share."""

from __future__ import annotations

from stoker.job.resolved import ResolvedJob
from stoker.job.task_spec import TASKS


def needs_shared_storage(job: ResolvedJob) -> bool:
    """Returns whether checkpoints are in the run's folder, or answers that the run reads there when it resumes."""
    return "://" not in (job.checkpoint.to or "") or TASKS[job.task].rows.prompts


def shared_storage_hint(job: ResolvedJob, *, several: bool = False) -> str:
    """Returns the suggestion for a node that does not see the folder.

    Args:
        several: whether the job has stages, whose records are in the folder.
    """
    if several:
        return "give an `output` on storage that all nodes share"
    answers = TASKS[job.task].rows.prompts
    why = "; the answers that the policy learns from are kept there" if answers else ", or a URL in `checkpoint.to`"
    return f"give an `output` on storage that all nodes share{why}"
