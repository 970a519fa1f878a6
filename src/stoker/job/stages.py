"""Splits a job file with ``stages``: every stage becomes the document of a separate job.

The other keys of the file are shared: a stage inherits them unless it writes its own. Blocks are merged key by key; if
a stage names another model or another method, that block is the stage's alone. A task's block applies to the stages of
that task only.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stoker.errors import Problem, UserError
from stoker.job.document.overrides import apply_overrides
from stoker.job.document.shorthand import MAIN_KEY
from stoker.job.document.yaml_document import COMMAND_LINE, JobDocument, Mark, read_document
from stoker.job.keys.key_paths import KeyPath, dotted, parse_key
from stoker.job.load_job import STAGES
from stoker.job.stage import NAME, Stage
from stoker.job.stage_links import resolve_stage_links, suggest_stage
from stoker.job.task_spec import TASKS

EACH_ITS_OWN = (("output",), ("checkpoint", "to"))  # shared folders, in which every stage has a subfolder
LENGTHS = ("steps", "epochs")  # mutually exclusive; a stage's own key replaces the shared one, whichever it is


@dataclass(frozen=True)
class StagedJob:
    """A job file with stages.

    Attributes:
        document: document of the file.
        root: parent folder of the stages' runs; a stage may name another.
        stages: in the file's order.
    """

    document: JobDocument
    root: str
    stages: tuple[Stage, ...]

    def stage(self, name: str) -> Stage:
        """Returns the stage of a name."""
        return next(stage for stage in self.stages if stage.name == name)

    def chosen(self, *, only: str | None, begin: str | None) -> list[Stage]:
        """Returns the stages chosen by ``--only NAME`` or ``--from NAME``; all stages without them.

        Raises:
            UserError: no stage has that name.
        """
        if only and begin:
            raise UserError(Problem("--only and --from both select stages", "keep one of them"))
        name = only or begin
        if name is None:
            return list(self.stages)
        names = [stage.name for stage in self.stages]
        if name not in names:
            option = "--only" if only else "--from"
            raise UserError(Problem(f"{option} {name}: there is no such stage", suggest_stage(name, names)))
        at = names.index(name)
        return list(self.stages[at : at + 1] if only else self.stages[at:])


def has_stages(path: str | Path) -> bool:
    """Returns whether a file has stages; False if it cannot be read."""
    return _document_with_stages(path) is not None


def read_stages(path: str | Path, overrides: Sequence[str] = ()) -> StagedJob:
    """Reads the stages of a file.

    Args:
        overrides: ``key=value`` for a shared key, ``stages.NAME.key=value`` for a stage's own.

    Raises:
        UserError: the list or a name is invalid, or a stage refers to one that is not earlier; with all problems.
    """
    return split_stages(read_document(path), overrides)


def stages_if_any(path: str | Path, overrides: Sequence[str] = ()) -> StagedJob | None:
    """Reads the stages of a file; returns None if it has none, or cannot be read.

    Raises:
        UserError: as `read_stages`, for a file with stages.
    """
    document = _document_with_stages(path)
    return None if document is None else split_stages(document, overrides)


def _document_with_stages(path: str | Path) -> JobDocument | None:
    try:
        document = read_document(path)
    except UserError:
        return None
    return document if STAGES in document.data else None


def split_stages(document: JobDocument, overrides: Sequence[str] = ()) -> StagedJob:
    """Splits the document of a file with stages. Arguments and errors are those of `read_stages`."""
    common, documents, shared, problems = _overridden(document, overrides)
    root = common.data.get("output") or _root(document)
    stages: list[Stage] = []
    for index, (name, own) in enumerate(documents.items()):
        stage = _stage(common, own, name, index, document.marks[(STAGES, index)], root)
        stage, wrong = resolve_stage_links(stage, stages, list(documents))
        problems += wrong
        stages.append(stage)
    problems += _without_effect(common, stages, shared)
    if problems:
        raise UserError(*problems)
    return StagedJob(document, str(root), tuple(stages))


def with_overrides(document: JobDocument, overrides: Sequence[str]) -> dict[str, Any]:
    """Returns the data of a file with stages, with the overrides applied, and `output` set to the folder of the runs.

    Raises:
        UserError: an override or the list of stages is invalid.
    """
    common, documents, _, problems = _overridden(document, overrides)
    if problems:
        raise UserError(*problems)
    stages = [{"name": name, **own.data} for name, own in documents.items()]
    return {**common.data, "output": common.data.get("output") or _root(document), STAGES: stages}


def _overridden(
    document: JobDocument, overrides: Sequence[str]
) -> tuple[JobDocument, dict[str, JobDocument], list[str], list[Problem]]:
    """Returns (shared keys, each stage's own keys by its name, overrides of shared keys, problems of overrides)."""
    items = _items(document)
    shared, of_stage, problems = _divided(overrides, [item["name"] for item in items])
    top = {key: value for key, value in document.data.items() if key != STAGES}
    marks = {where: mark for where, mark in document.marks.items() if where[0] != STAGES}
    common, wrong = apply_overrides(replace(document, data=top, marks=marks), shared)
    problems += wrong
    documents = {}
    for index, item in enumerate(items):
        documents[item["name"]], wrong = _own(document, index, item, of_stage.get(item["name"], []))
        problems += wrong
    return common, documents, shared, problems


def _root(document: JobDocument) -> str:
    return f"runs/{Path(document.file).stem or 'job'}"


def _items(document: JobDocument) -> list[dict[str, Any]]:
    """Returns the stages as written; each is a block with a unique name."""
    items = document.data[STAGES]
    if not isinstance(items, list) or not items:
        hint = "write one `- name: ...` with the keys of a job below it for each stage"
        raise UserError(document.problem((STAGES,), "`stages` must be a list of jobs", hint, at_key=True))
    names = [item.get("name") if isinstance(item, dict) else None for item in items]
    found = (_item_problem(document, index, item, names[:index]) for index, item in enumerate(items))
    if problems := [problem for problem in found if problem is not None]:
        raise UserError(*problems)
    return items


def _item_problem(document: JobDocument, index: int, item: Any, before: Sequence[Any]) -> Problem | None:
    """Returns why an item is not a stage; None if it is one.

    Args:
        before: the names of the items before it.
    """
    here: KeyPath = (STAGES, index)
    if not isinstance(item, dict):
        return document.problem(here, f"`{dotted(here)}` must be a block of keys", "write `- name: sft`")
    name = item.get("name")
    if name is None:
        return document.problem(here, f"`{dotted(here)}` has no `name`", "write `name: sft`")
    if not isinstance(name, str) or not re.fullmatch(NAME, name):
        hint = "write letters, digits, - and _, beginning with a letter or digit; a number in quotes"
        return document.problem((*here, "name"), f"{name!r} is not a name of a stage", hint)
    if name in before:
        return document.problem((*here, "name"), f"two stages are named {name}", "give each its own name")
    if STAGES in item:
        return document.problem((*here, STAGES), "a stage has no stages", "list them one after another")
    return None


def _divided(overrides: Sequence[str], names: list[str]) -> tuple[list[str], dict[str, list[str]], list[Problem]]:
    """Splits overrides into those of shared keys and those of each stage, the latter without the stage's name."""
    shared: list[str] = []
    of_stage: dict[str, list[str]] = {}
    problems = []
    for text in overrides:
        key, _, value = text.partition("=")
        head, _, rest = key.strip().removeprefix(STAGES).partition(".")
        if not key.strip().startswith((f"{STAGES}.", f"{STAGES}[")):
            shared.append(text)
            continue
        name, _, inner = rest.partition(".") if not head else ("", "", rest)
        if head and head[1:-1].isdecimal() and int(head[1:-1]) < len(names):
            name = names[int(head[1:-1])]
        if name in names and inner:
            of_stage.setdefault(name, []).append(f"{inner}={value}")
        elif name in names:
            problems.append(Problem(f"in `{text}`: a stage is not a value", "write stages.NAME.KEY=VALUE", key=key))
        else:
            problems.append(
                Problem(f"in `{text}`: there is no stage {name or head}", suggest_stage(name, names), key=key)
            )
    return shared, of_stage, [replace(problem, file=COMMAND_LINE) for problem in problems]


def _own(
    document: JobDocument, index: int, item: dict[str, Any], overrides: list[str]
) -> tuple[JobDocument, list[Problem]]:
    """Returns a stage's own keys as a document."""
    here = (STAGES, index)
    marks = {path[2:]: mark for path, mark in document.marks.items() if path[:2] == here and len(path) > 2}
    del marks[("name",)]
    data = {key: value for key, value in item.items() if key != "name"}
    own, problems = apply_overrides(JobDocument(document.file, data, marks), overrides)
    shown = {text: f"stages.{item['name']}.{text}" for text in overrides}
    named = {
        path: replace(mark, override=shown[mark.override]) if mark.override in shown else mark
        for path, mark in own.marks.items()
    }
    return replace(own, marks=named), problems


def _stage(common: JobDocument, own: JobDocument, name: str, index: int, place: Mark, root: Any) -> Stage:
    """Returns the stage with its own and the shared keys."""
    data, marks = _with_shared(common, own)
    if own.data.get("output") is None and isinstance(root, str):
        data["output"] = f"{root.rstrip('/')}/{name}"
        marks.setdefault(("output",), place)
    to = data.get("checkpoint", {}).get("to") if isinstance(data.get("checkpoint"), dict) else None
    if isinstance(to, str) and ("checkpoint", "to") not in own.marks:
        data["checkpoint"] = {**data["checkpoint"], "to": f"{to.rstrip('/')}/{name}"}
    planned = own.planned or (common.planned and "parallel" not in own.data)
    document = JobDocument(common.file, data, marks, planned)
    return Stage(name, index, document, frozenset(own.marks), place, output=str(data["output"]))


def _with_shared(common: JobDocument, own: JobDocument) -> tuple[dict[str, Any], dict[KeyPath, Mark]]:
    """Returns a stage's own data and marks, with those of the shared keys that it does not replace."""
    data, marks = dict(own.data), dict(own.marks)
    task = data.get("task", common.data.get("task"))
    for key, value in common.data.items():
        if (key in TASKS and key != task) or (key in LENGTHS and any(other in own.data for other in LENGTHS)):
            continue
        block = own.data.get(key)
        merges = isinstance(block, dict) and isinstance(value, dict) and not _is_alone(key, block, own)
        if key in own.data and not merges:
            continue
        written = block if isinstance(block, dict) else {}
        data[key] = {**value, **written} if merges else value
        for path, mark in common.marks.items():
            if path[0] == key and (len(path) == 1 or path[1] not in written):
                marks.setdefault(path, mark)
    return data, marks


def _is_alone(key: str, block: dict[str, Any], own: JobDocument) -> bool:
    """Returns whether a stage's block replaces the shared one: it names another model, method or layout."""
    main = MAIN_KEY.get(key)
    return (
        (main is not None and main in block)
        or (key == "model" and "from" in block)
        or (key == "parallel" and own.planned)
    )


def _without_effect(common: JobDocument, stages: Sequence[Stage], shared: Sequence[str]) -> list[Problem]:
    """Returns problems of shared values without effect: blocks of tasks without a stage, overrides that all replace."""
    problems = []
    tasks = {stage.document.data.get("task") for stage in stages}
    for key in common.data:
        if key in TASKS and key not in tasks:
            problems.append(common.problem((key,), f"`{key}` has no effect: no stage is of this task", "remove it"))
    for text in shared:
        path = parse_key(text.partition("=")[0].strip()) if "=" in text else ()
        expanded = [(*path, MAIN_KEY[str(path[0])])] if len(path) == 1 and path[0] in MAIN_KEY else [path]
        if path and path not in EACH_ITS_OWN and all(_replaces(stage, expanded[0]) for stage in stages):
            key = dotted(path)
            hint = f"write stages.{stages[0].name}.{text}"
            problems.append(Problem(f"in `{text}`: every stage has its own `{key}`", hint, key=key, file=COMMAND_LINE))
    return problems


def _replaces(stage: Stage, path: KeyPath) -> bool:
    mark = stage.document.marks.get(path)
    return path in stage.own or (mark is not None and not mark.override) or (mark is None and path[0] not in TASKS)
