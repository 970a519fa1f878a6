"""Expands the shorthands of blocks: ``model: NAME``, ``tune: lora``, ``special_tokens: [A, B]``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from stoker.job.document.yaml_document import JobDocument, Mark
from stoker.job.keys.annotations import block_of
from stoker.job.keys.key_paths import KeyPath
from stoker.job.schema import Job

# A single value in the place of the block is the value of this key.
MAIN_KEY = {"model": "name", "tune": "method"}
SOURCE_LISTS: tuple[KeyPath, ...] = (("data",), ("evaluate", "data"))
SOURCE_KEY = "path"
TOKENS = ("model", "special_tokens")  # a list in place of the block is the value of the key below
TOKENS_KEY = "additional"
ALL_AUTO = "parallel"  # `parallel: auto` is the empty block, resolved by the planner


def only_source(sources: Sequence[Any]) -> int | None:
    """Returns the index of the source that `data.KEY` is a key of; None if there are several."""
    return 0 if len(sources) < 2 else None


def expand_shorthands(document: JobDocument) -> JobDocument:
    """Expands every shorthand of a document; the marks of the written values are kept."""
    marks = dict(document.marks)
    data = dict(document.data)
    for key, main in MAIN_KEY.items():
        if _is_scalar(data.get(key)):
            marks[(key, main)] = marks[(key,)]
            data[key] = {main: data[key]}
    model = data.get("model")
    if isinstance(model, dict) and isinstance(model.get(TOKENS[1]), list | str):
        data["model"] = {**model, TOKENS[1]: _tokens(model[TOKENS[1]], marks)}
    planned = document.planned or data.get(ALL_AUTO) == "auto"
    if data.get(ALL_AUTO) == "auto":
        data[ALL_AUTO] = {}
    for name, field in Job.model_fields.items():
        block, is_list = block_of(field.annotation)
        if block is not None and not is_list and not field.is_required() and name in data and data[name] is None:
            # A block whose lines are all commented out is the block that was never begun.
            data[name] = None if field.default_factory is None else {}
    for path in SOURCE_LISTS:
        holder = data if len(path) == 1 else data.get(path[0])
        if isinstance(holder, dict) and path[-1] in holder:
            sources = _sources(holder[path[-1]], path, marks)
            if len(path) == 1:
                data["data"] = sources
            else:
                data[str(path[0])] = {**holder, path[-1]: sources}
    return replace(document, data=data, marks=marks, planned=planned)


def _sources(value: Any, path: KeyPath, marks: dict[KeyPath, Mark]) -> Any:
    if value is None:
        return []
    if isinstance(value, dict):
        below = {old: mark for old, mark in marks.items() if old[: len(path)] == path and len(old) > len(path)}
        for old in below:
            del marks[old]
        marks.update({(*path, 0, *old[len(path) :]): mark for old, mark in below.items()})
        value = [value]
        marks[(*path, 0)] = marks[path]
    elif _is_scalar(value):
        value = [value]
        marks[(*path, 0)] = marks[path]
    result = []
    for index, item in enumerate(value):
        if _is_scalar(item):
            marks[(*path, index, SOURCE_KEY)] = marks[(*path, index)]
        result.append({SOURCE_KEY: item} if _is_scalar(item) else item)
    return result


def _tokens(value: list[Any] | str, marks: dict[KeyPath, Mark]) -> dict[str, Any]:
    here = (*TOKENS, TOKENS_KEY)
    below = {old: mark for old, mark in marks.items() if old[:2] == TOKENS and len(old) > 2}
    for old in below:
        del marks[old]
    marks.update({(*here, *old[2:]): mark for old, mark in below.items()})
    marks[here] = marks[TOKENS]
    if isinstance(value, str):
        marks[(*here, 0)] = marks[TOKENS]
    return {TOKENS_KEY: [value] if isinstance(value, str) else value}


def _is_scalar(value: Any) -> bool:
    return value is not None and not isinstance(value, dict | list)
