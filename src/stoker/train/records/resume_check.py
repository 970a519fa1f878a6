"""Check that a job may resume in a folder: the same mathematics on the same data, or one clear error."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from stoker.checkpoint.object_collectives import by_first
from stoker.errors import Problem, RunFailed, UserError
from stoker.files import read_file
from stoker.job.conflicts.all_conflicts import has_effect
from stoker.job.keys.key_paths import KeyPath, dotted, field_at, flat
from stoker.job.keys.tune_keys import can_merge
from stoker.job.load_job import load_job
from stoker.job.resolved import ResolvedJob
from stoker.runs.run_folder import RunFolder

# Length, frequencies, layout and limits: none of these changes the result of a step. Keys are without list indices.
MAY_CHANGE = (
    "steps",
    "epochs",
    "output",
    "target",
    "export",
    "data.max_dropped",
    "evaluate.data.max_dropped",
    "evaluate.every",
    "evaluate.rows",
    "evaluate.samples",
    "checkpoint.every",
    "checkpoint.keep",
    "checkpoint.best",
    "checkpoint.keep_every",
    "checkpoint.full_every",
    "checkpoint.background",
    "checkpoint.memory",
    "faults",
    "parallel",
    "train.micro_batch",
    "train.accumulation",
    "train.tensorboard",
    "train.compile",
    "train.deterministic",
    "ranking.servers",
    "ranking.table.memory_rows",
)
NAMED = 8  # differences that an error names
BLOCK = "a block"


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


def with_effect(*jobs: ResolvedJob) -> list[dict[str, Any]]:
    """Returns the leaves of jobs by dotted key, without those that have no effect in one of them."""
    leaves = [flat(job.model_dump()) for job in jobs]
    idle = {key for job, own in zip(jobs, leaves, strict=True) for key in own if not changes_run(job, key)}
    return [{key: value for key, value in own.items() if key not in idle} for own in leaves]


def changes_run(job: ResolvedJob, key: str) -> bool:
    """Returns whether a dotted key, as in `flat`, has an effect in a job."""
    return has_effect(job, _path(key))


def _path(key: str) -> KeyPath:
    """Returns the path of a dotted key, as in `flat`. A name of the user's own, such as `regex:[0-9]+`, is its last."""
    parts = key.split(".")
    known = field_at(tuple(int(part) if part.isdigit() else part for part in parts))[1]
    own = ".".join(parts[len(known) :])
    return (*known, *([int(own) if own.isdigit() else own] if own else []))


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Describes the differences of two jobs by dotted key, except keys that may change during a run.

    A block that only one of them has is one difference, and so is a list of plain values.
    """
    keys = [key for key in sorted(old.keys() | new.keys()) if old.get(key) != new.get(key) and not _may_change(key)]
    before, after = _with_blocks(old), _with_blocks(new)
    found = {}
    for path in map(_path, keys):
        heads = (path[:end] for end in range(1, len(path)))
        place = next((head for head in heads if before.get(head) != after.get(head)), path)
        named = dotted(place) + _names_at(place, before, after)
        found[place] = f"{named} {_difference(before.get(place), after.get(place))}"
    return list(found.values())


def _names_at(path: KeyPath, *jobs: Mapping[KeyPath, Any]) -> str:
    """Returns `` (NAME, ...)`` of the named entries of a list that a key is in, or that are in it; else empty."""
    names = [
        str(value)
        for job in jobs
        for (*entry, last), value in job.items()
        if last == "name"
        and entry
        and isinstance(entry[-1], int)
        and all(a == b for a, b in zip(entry, path, strict=False))
    ]
    return f" ({', '.join(dict.fromkeys(names))})" if names else ""


def _with_blocks(leaves: Mapping[str, Any]) -> dict[KeyPath, Any]:
    """Returns the values of leaves by path, the values of each list that has no blocks, and `BLOCK` for each block."""
    values = {_path(key): value for key, value in leaves.items()}
    blocks = dict.fromkeys((path[:end] for path in values for end in range(1, len(path))), BLOCK)
    lists: dict[KeyPath, list[Any]] = {}
    for path, value in values.items():
        if isinstance(path[-1], int):
            lists.setdefault(path[:-1], []).append(value)
    return blocks | lists | values


def _difference(before: Any, after: Any) -> str:
    if BLOCK in (before, after) and None in (before, after):
        return "was added" if before is None else "was removed"
    return f"was {_shown(before)} and is {_shown(after)}"


def _shown(value: Any) -> str:
    return "not set" if value is None else BLOCK if value is BLOCK else repr(value)


def _may_change(key: str) -> bool:
    plain = re.sub(r"\.\d+(?=\.)", "", key)
    return any(plain == other or plain.startswith(f"{other}.") for other in MAY_CHANGE)


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
