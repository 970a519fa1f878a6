"""Loads a job file and overrides as a checked, resolved job that knows where each value was written."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from stoker.errors import Problem, UserError, placed_errors
from stoker.job.conflicts.all_conflicts import conflicts
from stoker.job.conflicts.conflict_view import View
from stoker.job.document.overrides import apply_overrides
from stoker.job.document.yaml_document import COMMAND_LINE, JobDocument, read_document
from stoker.job.keys.key_paths import KeyPath, block_at, parse_key
from stoker.job.keys.schema_errors import KeyFinding, findings
from stoker.job.resolution.resolve import Origin, resolve
from stoker.job.resolved import ResolvedJob
from stoker.job.run_records import is_of_run
from stoker.job.schema import SCHEMA_VERSION, Job

STAGES = "stages"  # a file with this key is read by `stoker.job.stages`
ISLANDS = "parallel.sync.islands"
AnyJob = TypeVar("AnyJob", bound=Job)
ANY_TASK = "sft"  # replaces a task that is missing or wrong, so that the rest can still be checked


@dataclass(frozen=True)
class ReadJob:
    """A job as its author wrote it, and the document it was read from."""

    job: Job
    document: JobDocument

    def problem(self, key: str, message: str, suggestion: str = "") -> Problem:
        """Returns a problem at a key's place; if it was not written, at the nearest enclosing key, or the file."""
        return self.document.problem(parse_key(key), message, suggestion)

    def placed(self, problem: Problem) -> Problem:
        """Returns a problem with the place of its key; unchanged if it has no key, or the place of another file."""
        if not problem.key or problem.file:
            return problem
        placed = self.problem(problem.key, problem.message, problem.suggestion)
        return replace(placed, columns=problem.columns)

    def errors_at(self, key: str) -> AbstractContextManager[None]:
        """Gives errors raised within the place of a key, whose value names what cannot be read or used.

        Messages of problems that have a place in another file begin with it.
        """
        return placed_errors(lambda found: self.problem(key, str(replace(found, suggestion="")), found.suggestion))

    def errors_at_their_keys(self) -> AbstractContextManager[None]:
        """Gives errors raised within the places of their own keys; see `placed`."""
        return placed_errors(self.placed)


@dataclass(frozen=True)
class LoadedJob(ReadJob):
    """A resolved job, and the origin of each of its leaves by dotted key.

    Attributes:
        plan: the planner's explanation of the layout, if it chose it.
    """

    job: ResolvedJob
    origins: dict[str, Origin]
    plan: str = ""

    def to_write(self, **changes: Any) -> ResolvedJob:
        """Returns the job, with other values of these keys, as it is written for another run.

        A sequence length that was not written stays `auto`, as a run lowers it to the model's context.
        """
        if self.origins["train.seq_len"].source == "default":
            changes["train"] = self.job.train.model_copy(update={"seq_len": "auto"})
        return self.job.model_copy(update=changes)


class JobError(UserError):
    """A job with problems. ``sound`` is the job without the invalid keys, for checks of other rooms."""

    def __init__(self, *problems: Problem | str, sound: ReadJob) -> None:
        super().__init__(*problems)
        self.sound = sound


def load_job(path: str | Path, overrides: Sequence[str] = ()) -> LoadedJob:
    """Read, check and resolve a job. Raises UserError with all problems, in the order of the file."""
    document = read_document(path)
    if STAGES in document.data:
        message = "this file has stages, and one job is wanted"
        hint = (
            "`stoker check`, `data`, `plan` and `train` take it; "
            "`stoker check FILE --only STAGE` prints a stage as a job"
        )
        raise UserError(document.problem((STAGES,), message, hint, at_key=True))
    return check_document(document, overrides)


def check_document(document: JobDocument, overrides: Sequence[str] = ()) -> LoadedJob:
    """Check and resolve a job that has been read. Raises UserError with all problems in the file's order."""
    document, problems = apply_overrides(_of_this_version(document), overrides)
    found: list[KeyFinding] = []
    try:
        job = Job.model_validate(document.data)
        wrong: set[KeyPath] = set()
    except ValidationError as error:
        found = findings(error, document)
        job, wrong = _without(document, found)
    problems += [document.problem(f.path, *_words(f, document), at_key=f.unknown) for f in found]
    judged = _named_otherwise(job, f"./{job.model.name}") if document.continues and job.model is not None else job
    problems += conflicts(View(judged, document, wrong))
    if isinstance(document.data.get("version"), bool):  # true equals 1, but is not a version
        problems.append(document.problem(("version",), "`version` must be 1, not true", "write 1"))
    if problems:
        raise JobError(*sorted(problems, key=problem_order), sound=ReadJob(job, document))
    resolved, origins = resolve(judged, document)
    return LoadedJob(_named_otherwise(resolved, job.model.name) if job.model else resolved, document, origins)


def block_problems(name: str, document: JobDocument, number: int) -> list[Problem]:
    """Returns the unknown keys and wrong values of one of a document's list of blocks, which stand for a job's block.

    Args:
        name: the job's block, such as ``parallel``.
        number: index in the list.
    """
    marks = {(name, *path[1:]): mark for path, mark in document.marks.items() if path[:1] == (number,)}
    alone = replace(document, data={"task": ANY_TASK, name: document.data[number]}, marks=marks)
    try:
        Job.model_validate(alone.data)
    except ValidationError as error:
        found = [finding for finding in findings(error, alone) if finding.path[:1] == (name,)]
        return [alone.problem(f.path, f.message, f.suggestion, at_key=f.unknown) for f in found]
    return []


def _of_this_version(document: JobDocument) -> JobDocument:
    """Returns a run's own job without `parallel.compile`, which earlier versions recorded beside `train.compile`."""
    parallel = document.data.get("parallel")
    if not isinstance(parallel, dict) or "compile" not in parallel or not is_of_run(Path(document.file)):
        return document
    others = {key: value for key, value in parallel.items() if key != "compile"}
    return replace(document, data=document.data | {"parallel": others})


def _named_otherwise(job: AnyJob, name: str) -> AnyJob:
    """Returns the job with another name of its model; defaults for random weights depend on the catalogue's names."""
    assert job.model is not None
    return job.model_copy(update={"model": job.model.model_copy(update={"name": name})})


def with_nodes(loaded: LoadedJob, nodes: int) -> LoadedJob:
    """Resolves the job again for this number of nodes, with equally many processes each.

    Args:
        nodes: 1 where nodes have different numbers of processes.

    Raises:
        JobError: something that was written has no effect there.
    """
    if loaded.document.nodes == nodes or loaded.job.parallel.sync.every == 1:
        return loaded
    found = check_document(replace(loaded.document, nodes=nodes))
    origins = {**loaded.origins, ISLANDS: found.origins[ISLANDS]}  # the planner's choice stays marked as its choice
    return replace(found, origins=origins, plan=loaded.plan)


def _words(finding: KeyFinding, document: JobDocument) -> tuple[str, str]:
    """Returns the finding's message and suggestion; a newer schema version has a message of its own."""
    if finding.path == ("version",):
        version = document.at(("version",))
        if isinstance(version, int) and version > SCHEMA_VERSION:
            message = f"this file is of version {version}, and this Stoker reads version {SCHEMA_VERSION}"
            return message, "install a newer Stoker"
    return finding.message, finding.suggestion


def _without(document: JobDocument, found: list[KeyFinding]) -> tuple[Job, set[KeyPath]]:
    """Returns the job without its invalid values, for the other checks, and the paths that cannot be checked."""
    data = copy.deepcopy(document.data)
    wrong = {finding.path for finding in found}
    # A misspelt key is not missing as well.
    wrong |= {f.meant for f in found if f.meant is not None and not document.where(f.meant)}
    while True:
        before = copy.deepcopy(data)
        for finding in found:
            _remove(data, finding.path, wrong)
        if "task" not in data:
            data["task"] = ANY_TASK
            wrong.add(("task",))
        assert data != before, f"nothing was removed for {found}"
        try:
            return Job.model_validate(data), wrong
        except ValidationError as error:
            # Removing a required key makes its block incomplete: the next round removes the block.
            found = findings(error, JobDocument(document.file, data, document.marks))
            wrong |= {finding.path for finding in found}


def _remove(data: dict[str, Any], path: KeyPath, wrong: set[KeyPath]) -> None:
    """Removes the value at a path; if it is missing, or inside a list, the block or list that requires it."""
    holder: Any = data
    for depth, part in enumerate(path):
        last = depth == len(path) - 1
        if isinstance(holder, list):
            # The other items keep their indices: a list with an invalid item is removed as a whole.
            if last or block_at(path[: depth + 1]) is None:
                wrong.add(path[:depth])
                return _remove(data, path[:depth], wrong)
        elif not isinstance(holder, dict) or part not in holder:
            wrong.add(path[:depth])
            return _remove(data, path[:depth], wrong) if depth else None
        if last:
            del holder[part]
            return None
        holder = holder[part]
    return None


def problem_order(problem: Problem) -> tuple[bool, int, int]:
    """Returns the sort key of problems: the file's from the top, then the command line's."""
    return problem.file == COMMAND_LINE, problem.line, problem.column
