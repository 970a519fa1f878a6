"""Overrides, ``key=value`` on the command line: validated exactly as the file's values."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from stoker.errors import Problem, UserError
from stoker.job.document.shorthand import ALL_AUTO, SOURCE_LISTS, expand_shorthands, only_source
from stoker.job.document.yaml_document import COMMAND_LINE, JobDocument, Mark, forbidden_character, parse_document
from stoker.job.keys.annotations import block_of
from stoker.job.keys.key_paths import KeyPath, dotted, field_at, parse_key


def apply_overrides(document: JobDocument, overrides: Sequence[str]) -> tuple[JobDocument, list[Problem]]:
    """Returns the document with the overrides applied in order, and the problems of invalid ones."""
    problems: list[Problem] = []
    document = expand_shorthands(document)
    for text in overrides:
        try:
            document = expand_shorthands(_apply(document, text))
        except UserError as error:
            problems += [
                Problem(f"in `{text}`: {p.message}", p.suggestion, key=p.key, file=COMMAND_LINE) for p in error.problems
            ]
    return document, problems


def _apply(document: JobDocument, text: str) -> JobDocument:
    name, equals, written = text.partition("=")
    if not equals:
        raise UserError(Problem(f"`{text}` is not an override", "write it as `key=value`, such as `train.lr=1e-4`"))
    if character := forbidden_character(text):
        raise UserError(Problem(f"it contains {character}, which is not allowed in text", "remove it"))
    path = _in_only_source(parse_key(name.strip()), document)
    value = parse_document(written, file=COMMAND_LINE)
    data = copy.deepcopy(document.data)
    holder = _holder(data, path)
    if isinstance(holder, list):
        if path[-1] == len(holder):
            holder.append(None)
        assert isinstance(path[-1], int)
        holder[path[-1]] = value.data
    else:
        holder[path[-1]] = value.data
    marks = {old: mark for old, mark in document.marks.items() if old[: len(path)] != path}
    mark = Mark(COMMAND_LINE, (0, 0), (0, 0), override=text)
    for end in range(1, len(path) + 1):
        marks.setdefault(path[:end], mark)
    marks.update({(*path, *inner): mark for inner in value.marks})
    return replace(document, data=data, marks=marks, planned=document.planned and path != (ALL_AUTO,))


def _in_only_source(path: KeyPath, document: JobDocument) -> KeyPath:
    """Returns ``data[0].KEY`` for ``data.KEY`` where `data` has a single source."""
    for sources in SOURCE_LISTS:
        own = path[len(sources) :]
        if path[: len(sources)] == sources and own and isinstance(own[0], str) and not own[0].isdigit():
            try:
                index = only_source(document.at(sources))
            except KeyError:  # there are none yet
                index = 0
            return path if index is None else (*sources, index, *own)
    return path


def _holder(data: dict[str, Any], path: KeyPath) -> Any:
    """Returns the block or list that contains the path's last part; creates missing blocks."""
    value: Any = data
    for depth, part in enumerate(path):
        here = dotted(path[:depth])
        if isinstance(part, int):
            if not isinstance(value, list):
                raise UserError(Problem(f"`{here}` is not a list", f"write `{here}=...`", key=dotted(path)))
            if part > len(value):
                hint = f"the next is `{here}[{len(value)}]`"
                raise UserError(Problem(f"`{here}` has {len(value)} items", hint, key=dotted(path)))
            if part == len(value) and depth < len(path) - 1:
                value.append({})
        elif isinstance(value, list):
            item = (int(part), *path[depth + 1 :]) if part.isdigit() else (0, *path[depth:])
            hint = f"write `{dotted((*path[:depth], *item))}`"
            raise UserError(Problem(f"`{here}` is a list", hint, key=dotted(path)))
        elif not isinstance(value, dict):
            raise UserError(Problem(f"`{here}` has no keys", f"write `{here}=...`", key=dotted(path)))
        if depth == len(path) - 1:
            return value
        if isinstance(value, dict) and value.get(str(part)) is None:
            value[str(part)] = _begun(path[: depth + 1])
        value = value[part]
    raise AssertionError("a parsed key is never empty")


def _begun(path: KeyPath) -> Any:
    """Returns an empty list if the schema has a list of blocks there, else an empty block."""
    field, found = field_at(path)
    is_list = field is not None and found == path and block_of(field.annotation)[1]
    return [] if is_list else {}
