"""The types of the schema's fields: which blocks and values they accept, and how messages describe them."""

from __future__ import annotations

import types
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from stoker.job.block import LARGEST, Block


def alternatives(annotation: Any) -> list[Any]:
    """Returns the members of a union, without None; an annotation that is not a union alone in a list."""
    if get_origin(annotation) in (Union, types.UnionType):
        return [inner for part in get_args(annotation) for inner in alternatives(part) if part is not type(None)]
    return [annotation]


def block_of(annotation: Any) -> tuple[type[Block] | None, bool]:
    """Returns the block type in a field's annotation, if any, and whether the field is a list of them."""
    for part in alternatives(annotation):
        if isinstance(part, type) and issubclass(part, Block):
            return part, False
        if get_origin(part) is list:
            inner, _ = block_of(get_args(part)[0])
            if inner is not None:
                return inner, True
    return None, False


def choices(annotation: Any) -> list[str]:
    """Returns the literal values that a value may have, ``auto`` among them."""
    return [str(c) for part in alternatives(annotation) if get_origin(part) is Literal for c in get_args(part)]


def accepts(annotation: Any, *kinds: type) -> bool:
    """Returns whether one of the alternatives is of these types."""
    return any(part in kinds or get_origin(part) in kinds for part in _bare(annotation))


def item_of(annotation: Any, key: str | int) -> Any:
    """Returns the annotation of what a list has at an index, or a mapping under a key."""
    kinds = {get_origin(part): get_args(part)[-1] for part in _bare(annotation) if get_origin(part) in (list, dict)}
    return kinds.get(list if isinstance(key, int) else dict) or next(iter(kinds.values()))


def describe(field: FieldInfo) -> str:
    """Describes the accepted values: ``a whole number above 0 or auto``."""
    return in_words(field.annotation, field.metadata)


def in_words(annotation: Any, bounds: list[Any]) -> str:
    """Describes the accepted values of an annotation with bounds."""
    return " or ".join(_describe(part, bounds) for part in alternatives(annotation))


def _bare(annotation: Any) -> list[Any]:
    """Returns the alternatives without their bounds."""
    return [get_args(part)[0] if get_origin(part) is Annotated else part for part in alternatives(annotation)]


def _describe(part: Any, bounds: list[Any]) -> str:
    origin = get_origin(part)
    if origin is Annotated:
        inner, *extra = get_args(part)
        bounds = [bound for item in extra for bound in (item.metadata if isinstance(item, FieldInfo) else [item])]
        return _describe(inner, bounds)
    if origin is Literal:
        values = [str(value) for value in get_args(part)]
        return values[0] if len(values) == 1 else f"one of {', '.join(values)}"
    block, is_list = block_of(part)
    if block is not None:
        return "a list of blocks" if is_list else "a block of keys"
    if origin is list:
        item = _describe(get_args(part)[0], [])
        return f"a list of {'words' if item == 'text' else item.replace('a whole number', 'whole numbers')}"
    words = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
    words |= {dict: "a block of names and values"}
    return words.get(origin or part, "any value") + (_bounds(bounds) if part in (int, float) else "")


def _bounds(bounds: list[Any]) -> str:
    low_open, low = _bound(bounds, "gt"), _bound(bounds, "ge")
    high_open, high = _bound(bounds, "lt"), _bound(bounds, "le")
    if high == str(LARGEST):  # every count has this limit: it is not worth a mention
        high = None
    if low is not None and high is not None:
        return f" from {low} to {high}"
    words = []
    if low_open is not None:
        words.append(f"above {low_open}")
    if low is not None:
        words.append(f"of at least {low}")
    if high_open is not None:
        words.append(f"below {high_open}")
    if high is not None:
        words.append(f"at most {high}")
    return f" {' and '.join(words)}" if words else ""


def _bound(bounds: list[Any], name: str) -> str | None:
    for bound in bounds:
        value = getattr(bound, name, None)
        if value is not None:
            return f"{value:g}" if isinstance(value, float) else str(value)
    return None
