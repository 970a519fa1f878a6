"""Sets and removes keys of a job's YAML and keeps its comments: the page's form edits the text with it."""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.error import YAMLError

from stoker.errors import UserError
from stoker.job.document.shorthand import ALL_AUTO, MAIN_KEY, SOURCE_KEY, only_source
from stoker.job.document.yaml_document import parse_document, parse_with_problems
from stoker.job.keys.key_paths import KeyPath, dotted, parse_key
from stoker.job.load_job import STAGES
from stoker.page.page_error import page_problem

WIDTH = 4096  # characters at which a line would be folded
SOURCES = "data"  # the last key of a list of sources
SHORT = {**MAIN_KEY, SOURCES: SOURCE_KEY}  # blocks that a single value may stand for, and the key that it is


def apply_edits(text: str, edits: Iterable[tuple[str, Any]]) -> str:
    """Returns the text after some edits, in order.

    Args:
        edits: (key, value); a value of None removes the key, and its block if that is then empty.

    Raises:
        UserError: the text is not YAML or too large, or a key leads into a value without keys, beyond the end
            of a list, or into several sources.
    """
    parse_with_problems(text, file="job.yaml")  # refuses what takes ruamel.yaml minutes, not values that are invalid
    yaml = YAML()
    yaml.preserve_quotes = True
    yaml.width = WIDTH
    yaml.indent(mapping=2, sequence=4, offset=2)
    try:
        data = yaml.load(text)
    except (YAMLError, ValueError, RecursionError):
        parse_document(text, file="job.yaml")  # raises our own message
        raise
    if data is None:
        data = CommentedMap()
    if not isinstance(data, CommentedMap):
        raise UserError(page_problem("the job has no keys", "start with a line such as `task: sft`"))
    for key, value in edits:
        job, path = _job_of(data, parse_key(key))
        if value is None:
            _remove(job, path)
        else:
            _set(job, path, value)
    out = io.StringIO()
    yaml.dump(data, out)
    return out.getvalue()


def _job_of(data: CommentedMap, path: KeyPath) -> tuple[CommentedMap, KeyPath]:
    """Returns the job that a path leads into, and the path in it: a stage has the keys of a job."""
    if path[0] == STAGES and len(path) > 2 and isinstance(stage := _at(data, path[:2]), CommentedMap):
        return stage, path[2:]
    return data, path


def _set(data: CommentedMap, path: KeyPath, value: Any) -> None:
    if path[0] in SHORT:
        path = _in_long_form(data, path, value)
    if len(path) > 1 and path[0] == ALL_AUTO and data.get(ALL_AUTO) == "auto":
        del data[ALL_AUTO]
    holder: Any = data
    for depth in range(len(path) - 1):
        holder = _block_at(holder, path, depth)
    _make_room(holder, path, len(path) - 1)
    holder[path[-1]] = value


def _in_long_form(data: CommentedMap, path: KeyPath, value: Any) -> KeyPath:
    """Returns the path of a key of a block that a single value may stand for, and gives the block keys if needed."""
    block, main, now = path[0], SHORT[str(path[0])], data.get(path[0])
    is_short = not isinstance(now, dict | list)
    if len(path) == 1:
        if is_short or isinstance(value, dict | list):
            return path
        path = (block, main)  # `data: FILE` where the text has `data:` with its own keys
    if path[1] == main and is_short:
        return (block,)
    if now is not None and is_short:
        data[block] = [{main: now}] if block == SOURCES else {main: now}
    return (block, _only_source(data), *path[1:]) if block == SOURCES and not isinstance(path[1], int) else path


def _block_at(holder: Any, path: KeyPath, depth: int) -> Any:
    """Returns the mapping or list at a depth of a path, and creates it if it is missing.

    Raises:
        UserError: there is a value without keys.
    """
    part, after = path[depth], path[depth + 1]
    _make_room(holder, path, depth)
    if holder[part] is None:
        holder[part] = CommentedSeq() if isinstance(after, int) else CommentedMap()
    if part == SOURCES and isinstance(after, int) and not isinstance(holder[part], list):
        holder[part] = [holder[part]]  # a single source without a list
    if not isinstance(holder[part], dict | list):
        if not isinstance(part, int) or path[depth - 1] != SOURCES:
            here = dotted(path[: depth + 1])
            raise UserError(page_problem("`{here}` has no keys", "write `{here}` itself", here=here))
        holder[part] = CommentedMap({SOURCE_KEY: holder[part]})  # a source that is a path alone
    return holder[part]


def _make_room(holder: Any, path: KeyPath, depth: int) -> None:
    """Creates the part at a depth of a path in its mapping or list, empty, if it is missing.

    Raises:
        UserError: the part is an index and the holder not a list, or vice versa; or it is beyond the list's end.
    """
    part, here = path[depth], dotted(path[:depth]) or "job.yaml"
    if isinstance(holder, list) != isinstance(part, int):
        if isinstance(holder, list):
            raise UserError(page_problem("`{here}` is a list", "write `{here}[0]`", here=here))
        raise UserError(page_problem("`{here}` is not a list", "omit the index", here=here))
    if isinstance(part, int):
        if part > len(holder):
            hint = "the next is `{here}[{n}]`"
            raise UserError(
                page_problem("`{here}` has no item {at}: there are {n}", hint, here=here, at=part, n=len(holder))
            )
        if part == len(holder):
            holder.append(None)
    else:
        holder.setdefault(part, None)


def _only_source(data: CommentedMap) -> int:
    """Returns the index of the only source of `data`, and converts a single block to a list."""
    now = data.get("data")
    if not isinstance(now, list):
        now = data["data"] = [CommentedMap() if now is None else now]
    index = only_source(now)
    if index is None:
        raise UserError(page_problem("`data` has {n} sources", "edit them in the YAML", n=len(now)))
    return index


def _remove(data: CommentedMap, path: KeyPath) -> None:
    """Removes a key, and then blocks that are empty; a source that is a path alone is its `path`."""
    if path[0] == SOURCES and len(path) > 1 and not isinstance(path[1], int) and isinstance(data.get(SOURCES), list):
        path = (SOURCES, _only_source(data), *path[1:])
    if path[-1] == SHORT.get(str(path[0])):  # `model: NAME` is `model.name`
        above = path[:-1]
        if not isinstance(_at(data, above), dict | list):
            path = above
    holders = [_at(data, path[:depth]) for depth in range(len(path))]
    if not _has(holders[-1], path[-1]):
        return
    del holders[-1][path[-1]]
    for depth in range(len(path) - 1, 0, -1):
        if holders[depth]:
            return
        del holders[depth - 1][path[depth - 1]]


def _at(data: Any, path: KeyPath) -> Any:
    """Returns the value at a path; None if there is none."""
    for part in path:
        data = data[part] if _has(data, part) else None
    return data


def _has(holder: Any, part: str | int) -> bool:
    if isinstance(part, int):
        return isinstance(holder, list) and part < len(holder)
    return isinstance(holder, dict) and part in holder
