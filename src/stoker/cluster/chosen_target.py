"""Selects the target: the job's own block, a file with one, or a name in the user's configuration."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from stoker.errors import Problem, UserError, did_you_mean
from stoker.job.block import Block
from stoker.job.document.overrides import apply_overrides
from stoker.job.document.text_file import read_text
from stoker.job.document.yaml_document import COMMAND_LINE, JobDocument, Mark, parse_document
from stoker.job.keys.key_paths import TARGET, KeyPath, parse_key
from stoker.job.keys.schema_errors import findings
from stoker.job.load_job import LoadedJob
from stoker.job.schema import Job
from stoker.job.targets import KINDS, LOCAL, TargetBlock, chosen_block

CONFIGURATION = "targets.yaml"
SUFFIXES = (".yaml", ".yml")
AROUND = {"task": "sft"}  # required keys of a job, added around a single block


@dataclass(frozen=True)
class ChosenTarget:
    """A target's block and where it is written.

    Attributes:
        kind: its key, such as ``ssh``.
        name: as the user has called it: a name, a file; empty for the job's own block.
        document: with the block at ``target.<kind>``.
    """

    kind: str
    block: Block
    name: str
    document: JobDocument

    def problem(self, key: str, message: str, suggestion: str = "") -> Problem:
        """Returns a problem at a key of the block, such as ``hosts[1]``; at the block for the empty key."""
        inner: KeyPath = parse_key(key) if key else ()
        return self.document.problem((TARGET, self.kind, *inner), message, suggestion)


def choose_target(loaded: LoadedJob, on: str | None, overrides: Sequence[str] = ()) -> ChosenTarget:
    """Returns the target of ``--on``, or else of the job.

    Args:
        overrides: ``target.KIND.key=value`` of the command line, for the target of ``--on``; the job has its own
            overrides already.

    Raises:
        UserError: it is `local`, there is no target of that name, or its block is wrong; with every problem's place.
    """
    target: str | TargetBlock = on if on is not None else loaded.job.target
    if isinstance(target, TargetBlock):
        return _chosen(target, "", loaded.document)
    if target != LOCAL:
        return named_target(target, loaded.document if on is None else None, overrides)
    hint = f"write `--on TARGET`, or a block under `{TARGET}:` ({', '.join(KINDS)}); here, `stoker train` trains it"
    problem = Problem("--on local: `local` is not a target of `stoker submit`", hint)
    if on is None:
        problem = loaded.document.problem((TARGET,), "the job has no target", hint)
    raise UserError(problem)


def split_overrides(on: str | None, overrides: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns the overrides of the job, and those of the target that ``--on`` names.

    Raises:
        UserError: both ``--on`` and ``target=`` name a target.
    """
    if on is None:
        return list(overrides), []
    of_target = [text for text in overrides if re.match(rf"\s*{TARGET}\s*[.=\[]", text)]
    for text in of_target:
        if text.partition("=")[0].strip() == TARGET:
            raise UserError(Problem(f"--on {on} and `{text}` both name a target", "write one of the two"))
    return [text for text in overrides if text not in of_target], of_target


def named_target(name: str, written: JobDocument | None = None, overrides: Sequence[str] = ()) -> ChosenTarget:
    """Returns the target of a file, or of that name in the user's configuration.

    Args:
        written: the job that names it, for the place of an error; None if the command line does.
        overrides: ``target.KIND.key=value`` of the command line, of the same kind.
    """
    if name.endswith(SUFFIXES):
        if not Path(name).is_file():
            raise UserError(_at(written, name, f"there is no file {name}", "name a file with a block such as `ssh:`"))
        document = parse_document(read_text(name), file=name)
        # The block may be written as in a job, below `target:`.
        below: KeyPath = (TARGET,) if isinstance(document.data, dict) and [*document.data] == [TARGET] else ()
        return _read(document.at(below), document, below, name, overrides)
    document = configured_targets()
    data = document.data
    if name not in data:
        known = f"it has {', '.join(map(str, data))}" if data else "write `NAME: {ssh: {hosts: [...]}}` there"
        hint = did_you_mean(name, data) or known
        raise UserError(_at(written, name, f"there is no target {name} in {document.file}", hint))
    return _read(data[name], document, (name,), name, overrides)


def configured_targets() -> JobDocument:
    """The targets of the user's configuration, by name; without any where there is no such file.

    Raises:
        UserError: the file cannot be read, or has no names.
    """
    file = targets_file()
    if not file.is_file():
        return JobDocument(str(file), {}, {})
    document = parse_document(read_text(file), file=str(file))
    if not isinstance(document.data or {}, dict):
        hint = "write `mine: {ssh: {hosts: [...]}}`"
        raise UserError(Problem("the file must map names to targets", hint, file=str(file), line=1, column=1))
    return replace(document, data=document.data or {})


def targets_file() -> Path:
    """Returns the user's file of targets: $XDG_CONFIG_HOME/stoker/targets.yaml, by default below ~/.config."""
    home = os.environ.get("XDG_CONFIG_HOME")
    return (Path(home) if home else Path("~/.config").expanduser()) / "stoker" / CONFIGURATION


def _at(written: JobDocument | None, name: str, message: str, hint: str) -> Problem:
    return Problem(f"--on {name}: {message}", hint) if written is None else written.problem((TARGET,), message, hint)


def _read(data: Any, read: JobDocument, below: KeyPath, name: str, overrides: Sequence[str]) -> ChosenTarget:
    """Returns the target of a mapping at a path of a document: checked as the block of a job is."""
    depth = len(below)
    inner = {(TARGET, *path[depth:]): mark for path, mark in read.marks.items() if path[:depth] == below}
    if not below:
        inner[(TARGET,)] = Mark(read.file, (1, 1), (1, 1))
    document = JobDocument(read.file, {**AROUND, TARGET: data}, inner)
    if not isinstance(data, dict):
        raise UserError(
            document.problem((TARGET,), "a target must be a block", f"write one of {', '.join(KINDS)} below it")
        )
    document = _overridden(document, overrides, name)
    try:
        target = Job.model_validate(document.data).target
    except ValidationError as error:
        found = findings(error, document)
        problems = (document.problem(f.path, f.message, f.suggestion, at_key=f.unknown) for f in found)
        raise UserError(*(p if below == (TARGET,) else _as_written(p) for p in problems)) from error
    assert isinstance(target, TargetBlock)
    return _chosen(target, name, document)


def _overridden(document: JobDocument, overrides: Sequence[str], name: str) -> JobDocument:
    """Returns a target's document with the overrides of the command line.

    Raises:
        UserError: one of them is of another kind of target, or is not a key of a kind.
    """
    written = [kind for kind in KINDS if kind in document.data[TARGET]]
    problems = []
    for text in overrides:
        _, *path = parse_key(text.partition("=")[0].strip())
        if len(path) < 2 or path[0] not in written:
            message = f"`{text}` is not a key of the target {name}, which is {' and '.join(written) or 'empty'}"
            hint = f"write, for example, `{TARGET}.{(written or [*KINDS])[0]}.nodes=2`"
            problems.append(Problem(message, hint, file=COMMAND_LINE))
    if problems:
        raise UserError(*problems)
    document, problems = apply_overrides(document, overrides)
    if problems:
        raise UserError(*problems)
    return document


def _as_written(problem: Problem) -> Problem:
    """Returns a problem whose keys begin with the target's kind, as in a file of targets."""
    if problem.file == COMMAND_LINE:
        return problem
    message, suggestion = (text.replace(f"`{TARGET}.", "`") for text in (problem.message, problem.suggestion))
    return replace(problem, message=message, suggestion=suggestion)


def _chosen(target: TargetBlock, name: str, document: JobDocument) -> ChosenTarget:
    found = chosen_block(target)
    if found is None:
        hint = f"write one of {', '.join(KINDS)}"
        raise UserError(document.problem((TARGET,), "a target must have exactly one block", hint))
    return ChosenTarget(*found, name, document)
