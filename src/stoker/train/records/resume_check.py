"""Check that a job may resume in a folder: the same mathematics on the same data, or one clear error."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from stoker.checkpoint.object_collectives import by_first
from stoker.errors import Problem, RunFailed, UserError
from stoker.files import read_file
from stoker.job.changed_keys import differences, with_effect
from stoker.job.keys.tune_keys import can_merge
from stoker.job.load_job import load_job
from stoker.job.resolved import ResolvedJob
from stoker.runs.run_folder import RunFolder

NAMED = 8  # differences that an error names


def check_same_job(
    job: ResolvedJob,
    fingerprints: dict[str, str],
    folder: RunFolder,
    *,
    resuming: bool,
    problem_of: Callable[[Mapping[str, str]], Problem | None] | None = None,
) -> list[str]:
    """Compares the job and its data with those of the folder's checkpoints. A collective.

    Args:
        problem_of: finds the problem of the data from the recorded fingerprints, for a task that names it itself.

    Returns:
        The files of code that have changed; see `corrected_code`.

    Raises:
        UserError: another job trained here, or the data has changed since.
    """
    return by_first(lambda: _check_same_job(job, fingerprints, folder, resuming, problem_of))


def _check_same_job(
    job: ResolvedJob,
    fingerprints: dict[str, str],
    folder: RunFolder,
    resuming: bool,
    problem_of: Callable[[Mapping[str, str]], Problem | None] | None,
) -> list[str]:
    how = "give another `output`, or --fresh to put the old run aside and start over"
    if not folder.job.is_file():
        if resuming:
            raise UserError(f"the checkpoints of {folder.path} are there, and its job.yaml is not: {how}")
        return []
    try:
        before = load_job(folder.job).job
    except UserError as error:
        raise UserError(f"{folder.path} holds a run whose job cannot be read ({error.problems[0]}): {how}") from error
    if not resuming and before.checkpoint.to == job.checkpoint.to:
        return []  # it ended before its first checkpoint
    differing = differences(*with_effect(before, job))
    if differing:
        more = [f"and {len(differing) - NAMED} more"] if len(differing) > NAMED else []
        named = "; ".join([*differing[:NAMED], *more])
        raise UserError(f"{folder.path} holds a run of another job ({named}): {how}")
    recorded = _data_of(folder)
    if problem_of is not None and (problem := problem_of(recorded)):
        hint = f"{problem.suggestion}; or {how}"
        raise UserError(replace(problem, message=f"{folder.path}: {problem.message}", suggestion=hint))
    changed = [name for name, was in recorded.items() if fingerprints.get(name) != was]
    corrected = corrected_code(changed, folder)
    if refused := [name for name in changed if name not in corrected]:
        export = f"`stoker export {folder.path} --format merged --to DIR`"
        keep = f"to train on from its weights, {export} and write `model: DIR` with another `output`; "
        hint = f"restore it; {keep if job.model is not None and can_merge(job) else ''}or {how}"
        raise UserError(Problem(f"{refused[0]} has changed since the run in {folder.path} began", hint))
    return corrected


def corrected_code(inputs: Iterable[str], folder: RunFolder) -> list[str]:
    """Returns the inputs that are files of Python code, if a failure of the user's code ended the run: they may change,
    as whoever corrects the failure changes them.
    """
    code = [name for name in inputs if name.endswith(".py")]
    return code if code and folder.ended_in_user_code() else []


def check_none_lost(folder: RunFolder, place: Path | str) -> None:
    """Raises RunFailed where the run's record lists checkpoints and none exists.

    Args:
        place: folder of the checkpoints.
    """
    if saved := folder.saved_steps():
        raise RunFailed(
            f"the run in {folder.path} has saved step {max(saved)}, and there is no checkpoint in {place}; nothing has "
            "been changed. Put one back, or write --fresh: it renames this run's folder and trains from the first step"
        )


def _data_of(folder: RunFolder) -> dict[str, str]:
    """Returns the fingerprints that the run recorded; empty if its record is lost."""
    try:
        return dict(json.loads(read_file(folder.environment))["data"])
    except (OSError, ValueError, KeyError, TypeError):
        return {}
