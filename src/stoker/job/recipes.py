"""Recipes: short working jobs, written with an explanation of every key of the schema."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

from stoker.errors import Problem, UserError
from stoker.job.block import Block
from stoker.job.document.job_to_yaml import INDENT, comment_lines, scalar
from stoker.job.document.shorthand import expand_shorthands
from stoker.job.document.yaml_document import parse_document
from stoker.job.keys.annotations import block_of, describe
from stoker.job.keys.editor_schema import STAGES_MEAN
from stoker.job.keys.key_paths import APART, TARGET, KeyPath, example_of
from stoker.job.keys.suggest_key import nearest
from stoker.job.load_job import STAGES
from stoker.job.schema import SCHEMA_VERSION, Job

FOLDER = Path(__file__).parent / "recipes"
DEFAULT_RECIPE = "sft-lora"
WIDTH = 110

EXPLAINED = (
    "The comment above a key gives its meaning, its type and its default. A line that starts with `#` and a "
    "key is disabled: it shows the default or an example. Remove the `#` to set the key. "
    "Then run `stoker check` on this file."
)
SHARED = (
    "The stages are at the end of the file. A key above them applies to all stages that do not set it; `stoker "
    "check` prints each complete stage."
)


def recipe_names() -> list[str]:
    """Returns the names of all recipes, the default first."""
    names = sorted(path.stem for path in FOLDER.glob("*.yaml"))
    return sorted(names, key=lambda name: name != DEFAULT_RECIPE)


def recipe_description(name: str) -> str:
    """Returns the paragraph that opens a recipe. Raises UserError for an unknown name."""
    opening = takewhile(lambda line: line.startswith("#"), _recipe_text(name).splitlines())
    return " ".join(line.removeprefix("#").strip() for line in opening)


def write_recipe(name: str = DEFAULT_RECIPE) -> str:
    """Returns the recipe as a job file with every key of the schema: set, or switched off by ``#``.

    Raises UserError for an unknown name.
    """
    text, dash, stages = _recipe_text(name).partition(f"\n{STAGES}:\n")
    document = expand_shorthands(parse_document(text, file=name))
    lines = [*comment_lines(f"Recipe {name}. {recipe_description(name)}", WIDTH), "#", *comment_lines(EXPLAINED, WIDTH)]
    if dash:
        lines += ["#", *comment_lines(SHARED, WIDTH)]
    lines += _block_lines(Job, {"version": SCHEMA_VERSION, **document.data}, (), live=True)
    if dash:
        lines += ["", *comment_lines(STAGES_MEAN, WIDTH), f"{STAGES}:", *stages.rstrip().splitlines()]
    return "\n".join(lines) + "\n"


def _recipe_text(name: str) -> str:
    path = FOLDER / f"{name}.yaml"
    if name not in recipe_names():
        near = nearest(name, recipe_names())
        names = ", ".join(recipe_names())
        raise UserError(Problem(f"there is no recipe `{name}`", f"write {near}" if near else f"take one of {names}"))
    return path.read_text(encoding="utf-8")


def _block_lines(block: type[Block], values: dict[str, Any], path: KeyPath, *, live: bool) -> Iterator[str]:
    """Yields the lines of a block: the keys in ``values`` live if the block itself is, all others switched off."""
    for name, field in block.model_fields.items():
        here = (*path, name)
        inner, is_list = block_of(field.annotation)
        is_set = live and name in values
        if not path:
            yield ""
        yield from _comment(field, here)
        if inner is None or here in APART:
            yield _line(here, f"{name}: {_value(field, here, values.get(name))}", is_set)
            continue
        items = values.get(name) or {}
        if isinstance(items, str):  # a text in the block's place
            yield _line(here, f"{name}: {scalar(items)}", is_set)
            continue
        yield _line(here, f"{name}:", is_set)
        for item in items if isinstance(items, list) else [items]:
            lines = list(_block_lines(inner, item, (*here, 0) if is_list else here, live=is_set))
            yield from _with_dash(lines) if is_list else lines


def _comment(field: FieldInfo, path: KeyPath) -> Iterator[str]:
    inner, _ = block_of(field.annotation)
    text = str(field.description)
    if inner is None or path == (TARGET,):
        default = "" if field.is_required() or field.default is None else field.get_default(call_default_factory=True)
        ends = (
            "required"
            if field.is_required()
            else f"default {scalar(default)}"
            if default != ""
            else "not set by default"
        )
        text = f"{text} [{describe(field)}; {ends}]"
    elif path == ("evaluate", "data"):
        text = f"{text} [a list as under data: above; empty by default]"
    yield from comment_lines(text, WIDTH, f"{_indent(path)}# ")


def _value(field: FieldInfo, path: KeyPath, value: Any) -> str:
    if value is not None:
        return scalar(value)
    if field.is_required() or field.default is None:
        return example_of(path)
    return scalar(field.get_default(call_default_factory=True))


def _line(path: KeyPath, text: str, is_set: bool) -> str:
    return ("" if is_set else "#") + _indent(path) + text


def _indent(path: KeyPath) -> str:
    return " " * (INDENT * (len(path) - 1))


def _with_dash(lines: list[str]) -> Iterator[str]:
    """Yields the lines of a list's item: a dash before its first key."""
    begun = False
    for line in lines:
        is_comment = line.startswith(" ") and line.lstrip().startswith("#")
        if begun or is_comment:
            yield line
            continue
        begun = True
        at = len(line) - len(line.removeprefix("#").lstrip())
        yield line[: at - INDENT] + "- " + line[at:]
