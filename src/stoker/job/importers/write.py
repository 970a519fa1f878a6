"""Writes the imported job as a YAML file: values with their origins, the report as comments above them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from stoker.job.block import Block
from stoker.job.document.job_to_yaml import comment_lines, nested, scalar
from stoker.job.importers.config_reader import NOT_SET
from stoker.job.importers.foreign_layout import Aside
from stoker.job.importers.key_outcomes import DEFAULT, ENGINE_DEFAULT, OVERRIDE, Carried, Dropped, Unknown
from stoker.job.keys.annotations import block_of
from stoker.job.keys.key_paths import KeyPath, parse_key
from stoker.job.schema import SCHEMA_VERSION, Job

WIDTH = 118
INDENTED = "#   ", "#     "  # before the first line of a comment, and before the others
T = TypeVar("T")


def write_job(
    values: Mapping[str, Carried],
    asides: Sequence[Aside],
    dropped: Sequence[Dropped],
    unknown: Sequence[Unknown],
    missing: Sequence[str],
    title: str,
) -> str:
    """Returns the job's text. ``missing`` are the required keys that no file gives; their values are examples."""
    entries: dict[str, Carried | Aside] = {**values, **{aside.target: aside for aside in asides}}
    lines = [*_report(title, dropped, unknown, missing), "", f"version: {SCHEMA_VERSION}"]
    for start, path, entry in nested(_in_order(entries)):
        example = len(path) == 1 and path[0] in missing
        if entry is None:
            lines.append(f"{start}:" + "  # an example: write your own" * example)
        else:
            lines += _leaf(start, entry, example=example)
    return "\n".join(lines) + "\n"


def as_blocks(values: Mapping[str, Carried]) -> dict[str, Any]:
    """Returns the job's values as nested blocks and lists, in the schema's order."""
    tree: dict[str | int, Any] = {"version": SCHEMA_VERSION}
    for path, entry in _in_order(values):
        block = tree
        for part in path[:-1]:
            block = block.setdefault(part, {})
        block[path[-1]] = entry.value
    return {str(key): _listed(value) for key, value in tree.items()}


def origin(entry: Carried) -> str:
    """Describes the origin of a value and the difference in meaning."""
    if entry.strength == OVERRIDE:
        text = "command line"
    elif entry.strength in (DEFAULT, ENGINE_DEFAULT) and entry.tool:
        text = f"{entry.tool}'s default"
    else:
        text = entry.key
    note = entry.note.strip()
    return "; ".join(part for part in (text, note) if part)


def _in_order(entries: Mapping[str, T]) -> list[tuple[KeyPath, T]]:
    return sorted(((parse_key(target), entry) for target, entry in entries.items()), key=lambda item: _rank(item[0]))


def _rank(path: KeyPath) -> list[int]:
    """Returns a key's position in the schema's order."""
    ranks: list[int] = []
    block: type[Block] = Job
    for part in path:
        if isinstance(part, str):
            ranks.append(list(block.model_fields).index(part))
            block = block_of(block.model_fields[part].annotation)[0] or block
        else:
            ranks.append(part)
    return ranks


def _listed(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if value and all(isinstance(key, int) for key in value):
        return [_listed(value[key]) for key in sorted(value)]
    return {key: _listed(inner) for key, inner in value.items()}


def _report(
    title: str, dropped: Sequence[Dropped], unknown: Sequence[Unknown], missing: Sequence[str]
) -> Iterator[str]:
    yield from comment_lines(title, WIDTH)
    if missing:
        yield "#"
        keys = ", ".join(f"`{key}`" for key in missing)
        yield from comment_lines(f"EXAMPLE VALUES; no file sets them: {keys}. Write your own.", WIDTH)
    grave = [item for item in dropped if item.matters]
    if grave:
        yield from ("#", "# Not carried over, and it makes a difference:")
        for item in grave:
            yield from comment_lines(f"{item.key}: {short(item.value)} -- {item.why}", WIDTH, *INDENTED)
    if unknown:
        yield from ("#", "# Unknown keys, not carried over:")
        for one in unknown:
            near = f" (near: {one.near})" if one.near else ""
            yield from comment_lines(f"{one.key}: {short(one.value)}{near}", WIDTH, *INDENTED)
    idle = [item for item in dropped if not item.matters and item.why != NOT_SET]
    if idle:
        yield from ("#", "# No equivalent needed:")
        by_reason: dict[str, list[str]] = {}
        for item in idle:
            by_reason.setdefault(item.why, []).append(item.key)
        for why, keys_of in by_reason.items():
            yield from comment_lines(f"{', '.join(keys_of)} -- {why}", WIDTH, *INDENTED)


def short(value: Any, most: int = 60) -> str:
    """Returns a value as YAML, of at most ``most`` characters."""
    text = scalar(value)
    return text if len(text) <= most else f"{text[: most - 3]}..."


def _leaf(start: str, entry: Carried | Aside, *, example: bool) -> list[str]:
    """Formats the line of a value with its origin; a long note becomes a comment above it."""
    key = start.lstrip(" -")
    indent = " " * (len(start) - len(key))
    line = f"{start}: {scalar(entry.value)}"
    if isinstance(entry, Aside):
        line, note = f"{indent}# {key}: {scalar(entry.value)}", entry.why
    else:
        note = "an example: write your own" if example else origin(entry)
    if not note:
        return [line]
    if len(line) + len(note) + 4 <= WIDTH:
        return [f"{line}  # {note}"]
    return [*comment_lines(note, WIDTH, f"{indent}# "), line]
