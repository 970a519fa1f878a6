"""The imported job as a YAML file: values with where they are from, the report as comments above them."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from stoker.job.block import Block
from stoker.job.importers.foreign_layout import Aside
from stoker.job.importers.ledger import DEFAULT, ENGINE_DEFAULT, NOT_SET, OVERRIDE, Carried, Dropped, Unknown
from stoker.job.job_to_yaml import INDENT, scalar
from stoker.job.key_paths import KeyPath, block_of, parse_key
from stoker.job.schema import SCHEMA_VERSION, Job

WIDTH = 118
Nested = dict[str | int, Any]  # blocks by name, sources by number; a Carried or an Aside at the ends


def write_job(
    values: Mapping[str, Carried],
    asides: Sequence[Aside],
    dropped: Sequence[Dropped],
    unknown: Sequence[Unknown],
    missing: Sequence[str],
    title: str,
) -> str:
    """The job's text. ``missing`` are the keys whose values are examples, for no file says them."""
    tree: Nested = {}
    for target, entry in values.items():
        _put(tree, parse_key(target), entry)
    for aside in asides:
        _put(tree, parse_key(aside.target), aside)
    lines = list(_report(title, dropped, unknown, missing))
    lines += ["", f"version: {SCHEMA_VERSION}"]
    lines += _block(Job, tree, 0, missing)
    return "\n".join(lines) + "\n"


def plain(values: Mapping[str, Carried]) -> dict[str, Any]:
    """The job's values as nested blocks and lists, in the schema's order."""
    tree: Nested = {}
    for target, entry in values.items():
        _put(tree, parse_key(target), entry.value)
    return {"version": SCHEMA_VERSION, **_listed(_ordered(tree, Job))}


def origin(entry: Carried) -> str:
    """Where a value is from, and what differs, in words."""
    if entry.strength == OVERRIDE:
        text = "command line"
    elif entry.strength in (DEFAULT, ENGINE_DEFAULT) and entry.tool:
        text = f"{entry.tool}'s default"
    else:
        text = entry.key
    note = entry.note.strip()
    return "; ".join(part for part in (text, note) if part)


def _put(tree: Nested, path: KeyPath, value: Any) -> None:
    for part in path[:-1]:
        tree = tree.setdefault(part, {})
    tree[path[-1]] = value


def _ordered(tree: Nested, block: type[Block]) -> Nested:
    result: Nested = {}
    for name, field in block.model_fields.items():
        if name not in tree:
            continue
        inner, is_list = block_of(field.annotation)
        value = tree[name]
        if inner is not None and is_list:
            result[name] = {index: _ordered(value[index], inner) for index in sorted(value)}
        else:
            result[name] = _ordered(value, inner) if inner is not None and isinstance(value, dict) else value
    return result


def _listed(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if value and all(isinstance(key, int) for key in value):
        return [_listed(value[key]) for key in sorted(value)]
    return {key: _listed(inner) for key, inner in value.items()}


def _report(
    title: str, dropped: Sequence[Dropped], unknown: Sequence[Unknown], missing: Sequence[str]
) -> Iterator[str]:
    yield from _comment(title)
    if missing:
        yield "#"
        keys = ", ".join(f"`{key}`" for key in missing)
        yield from _comment(f"EXAMPLES, for no file says them: {keys}. Write your own.")
    grave = [item for item in dropped if item.matters]
    if grave:
        yield from ("#", "# Not carried over, and it makes a difference:")
        for item in grave:
            yield from _comment(f"{item.key}: {_short(item.value)} -- {item.why}", "  ")
    if unknown:
        yield from ("#", "# Unknown keys, not carried over:")
        for one in unknown:
            near = f" (near: {one.near})" if one.near else ""
            yield from _comment(f"{one.key}: {_short(one.value)}{near}", "  ")
    idle = [item for item in dropped if not item.matters and item.why != NOT_SET]
    if idle:
        yield from ("#", "# Needed no line:")
        by_reason: dict[str, list[str]] = {}
        for item in idle:
            by_reason.setdefault(item.why, []).append(item.key)
        for why, keys_of in by_reason.items():
            yield from _comment(f"{', '.join(keys_of)} -- {why}", "  ")


def _comment(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=f"# {indent}",
        subsequent_indent=f"# {indent}{indent}",
        break_on_hyphens=False,
        break_long_words=False,
    )


def _short(value: Any) -> str:
    text = scalar(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _block(block: type[Block], tree: Nested, depth: int, missing: Sequence[str]) -> Iterator[str]:
    for name, field in block.model_fields.items():
        if name not in tree:
            continue
        inner, is_list = block_of(field.annotation)
        indent = " " * (INDENT * depth)
        if inner is None or not isinstance(tree[name], dict):  # a block may have a text in its place
            yield from _leaf(indent, name, tree[name], name in missing)
            continue
        yield f"{indent}{name}:" + ("  # an example: write your own" if name in missing else "")
        items = [tree[name][index] for index in sorted(tree[name])] if is_list else [tree[name]]
        for item in items:
            lines = list(_block(inner, item, depth + 1 + is_list, missing))
            yield from _with_dash(lines, depth) if is_list else lines


def _leaf(indent: str, name: str, entry: Carried | Aside, example: bool) -> Iterator[str]:
    if isinstance(entry, Aside):
        yield from _noted(f"{indent}# {name}: {scalar(entry.value)}", entry.why, indent)
        return
    note = "an example: write your own" if example else origin(entry)
    yield from _noted(f"{indent}{name}: {scalar(entry.value)}", note, indent)


def _noted(line: str, note: str, indent: str) -> Iterator[str]:
    if not note:
        yield line
    elif len(line) + len(note) + 4 <= WIDTH:
        yield f"{line}  # {note}"
    else:
        lead = f"{indent}# "
        yield from textwrap.wrap(note, WIDTH, initial_indent=lead, subsequent_indent=lead, break_on_hyphens=False)
        yield line


def _with_dash(lines: list[str], depth: int) -> Iterator[str]:
    """The lines of a list's item, with a dash before its first key; comments before it move ahead of the dash."""
    at = INDENT * (depth + 1)
    begun = False
    for line in lines:
        if not begun and not line.lstrip().startswith("#"):
            begun = True
            yield line[:at] + "- " + line[at + INDENT :]
        else:
            yield line
