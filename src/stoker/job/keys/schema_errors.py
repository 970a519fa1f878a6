"""Converts pydantic's errors to readable ones: one finding for each invalid key."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from stoker.errors import UserError
from stoker.job.block import LARGEST
from stoker.job.document.yaml_document import JobDocument, parse_value
from stoker.job.keys.annotations import accepts, block_of, choices, describe, in_words, item_of
from stoker.job.keys.key_paths import KeyPath, dotted, example_of, field_at
from stoker.job.keys.suggest_key import nearest, suggest_key
from stoker.job.keys.text_forms import form_of

SPELT_TRUE = ("yes", "on", "y", "true")
SPELT_FALSE = ("no", "off", "n", "false")
_THOUSANDS = re.compile(r"[-+]?[1-9]\d{0,2}([ ,_]\d{3})+(\.\d+)?")
_DECIMAL_COMMA = re.compile(r"[-+]?\d+,\d+([eE][-+]?\d+)?")
_LEADING_NUMBER = re.compile(r"\d+(\.\d+)?([eE][-+]?\d+)?(?![oOlI])(?=\D*$)")  # a letter may be a digit mistyped


@dataclass(frozen=True)
class KeyFinding:
    """One invalid key: its path, the problem, the suggestion, and the key that an unknown one was meant to be."""

    path: KeyPath
    message: str
    suggestion: str
    unknown: bool = False
    meant: KeyPath | None = None


def findings(error: ValidationError, document: JobDocument) -> list[KeyFinding]:
    """Returns one finding for each invalid key. All members of a union raise an error; the key is reported once."""
    found: dict[KeyPath, KeyFinding] = {}
    missing: set[KeyPath] = set()
    errors = error.errors(include_url=False)
    forms = {_written_path(item["loc"], document): form for item in errors if (form := form_of(item))}
    for item in errors:
        path = _written_path(item["loc"], document)
        if item["type"] == "missing":
            absent = (*path, item["loc"][-1])
            missing.add(absent)
            found[absent] = _missing(absent)
        elif item["type"] == "extra_forbidden":
            near = suggest_key(path[:-1], str(path[-1]))
            found[path] = KeyFinding(path, f"unknown key `{dotted(path)}`", near.text, True, near.target)
        elif item["loc"][-1] == "[key]" and path in forms:  # a name in a mapping
            message = f"`{path[-1]}` cannot be a name in `{dotted(path[:-1])}`; it must be {forms[path]}"
            found[path] = KeyFinding(path, message, "write another name", True)
        else:
            found.setdefault(path, _wrong(path, document, forms.get(path, "")))
    inner = {path[:end] for path in found for end in range(len(path))}
    misspelt = missing & {finding.meant for finding in found.values()}
    return [f for path, f in found.items() if path not in misspelt and (path not in inner or f.unknown)]


def _written_path(loc: tuple[int | str, ...], document: JobDocument) -> KeyPath:
    """Returns the validator's location without the names of union members, which are no keys of the file."""
    path: KeyPath = ()
    value: Any = document.data
    part: Any
    for part in loc:
        # Names of union members ("constrained-int", "list[str]") are not keys of the job.
        if (isinstance(value, dict) and part in value) or (isinstance(value, list) and isinstance(part, int)):
            path, value = (*path, part), value[part]
    return path


def _missing(path: KeyPath) -> KeyFinding:
    field, _ = field_at(path)
    assert field is not None
    options = choices(field.annotation)
    example = " | ".join(options) if options else "..."
    where = f" in `{dotted(path[:-1])}`" if len(path) > 1 else ""
    return KeyFinding(path, f"`{path[-1]}` is missing{where}", f"write `{path[-1]}: {example}` ({field.description})")


def _wrong(path: KeyPath, document: JobDocument, form: str) -> KeyFinding:
    """Returns the finding for a value of the wrong type or pattern.

    Args:
        form: description of the strings that match the key's pattern; empty if the key has no pattern.
    """
    value = document.at(path)
    name = f"`{dotted(path)}`" if path else "the job"
    field, home = field_at(path)
    if field is None:
        return KeyFinding(path, f"{name} must be a block of keys, not {shown_value(value)}", "write `key: value` lines")
    item = item_of(field.annotation, path[-1]) if home != path else field.annotation
    if isinstance(value, str) and (form or (value and accepts(item, str) and not choices(item))):
        words = in_words(item, []).replace("text", form, 1)
        message = (
            f"{name} must be {words}, not {shown_value(value)}" if form else f"{name} cannot be {shown_value(value)}"
        )
        return KeyFinding(path, message, f"write, for example, {example_of(home)} ({field.description})")
    if home != path:
        instead = _quoted(value) if item is str else _instead(item, value)
        return KeyFinding(path, f"{name} must be {in_words(item, [])}, not {shown_value(value)}", instead)
    block, is_list = block_of(field.annotation)
    if block is not None and not (is_list and value == []):
        if is_list and not isinstance(path[-1], int):
            expected, hint = "a list", f"write one `- {next(iter(block.model_fields))}: ...` line for each"
        else:
            keys = ", ".join(list(block.model_fields)[:5])
            expected, hint = "a block of keys", f"write its keys ({keys}, ...) indented below it"
        text = "text or " if accepts(field.annotation, str) else ""
        return KeyFinding(path, f"{name} must be {text}{expected}, not {shown_value(value)}", hint)
    if value in (None, "", []):
        at_least_one = value == [] and accepts(field.annotation, list)
        hint = "write at least one item" if at_least_one else f"write {describe(field)}, or remove the line"
        return KeyFinding(path, f"{name} is empty", hint)
    message = f"{name} must be {describe(field)}, not {shown_value(value)}"
    instead = _instead(field.annotation, value) or f"write a value such as {example_of(home)}"
    if isinstance(value, int) and value > LARGEST and accepts(field.annotation, int):
        message, instead = f"{name} is {value}, larger than any count can be", f"write at most {LARGEST}"
    return KeyFinding(path, message, instead)


def _instead(annotation: Any, value: Any) -> str:
    """Returns the suggestion for a value of the wrong type; empty if the intended value cannot be guessed."""
    options = choices(annotation)
    numeric = accepts(annotation, int, float)
    if isinstance(value, float) and accepts(annotation, int) and value.is_integer() and abs(value) < 1e15:
        return f"write {int(value)}"
    if isinstance(value, str) and (meant := _meant_by_text(annotation, value)):
        return meant
    if isinstance(value, int) and accepts(annotation, list):
        return " or ".join([f"write [{value}]", *options])
    if isinstance(value, int | float) and numeric and not isinstance(value, bool):
        return ""  # a number out of bounds, where text is accepted as well
    if options and isinstance(value, str | int | float):
        near = nearest(str(value), options)
        return f"write {near}" if near is not None and (isinstance(value, str) or not numeric) else ""
    return _quoted(value) if accepts(annotation, str) else ""


def _meant_by_text(annotation: Any, text: str) -> str:
    """Returns the suggestion for a string in place of a boolean, a number or a list."""
    word = text.strip().lower()
    if accepts(annotation, bool) and word in SPELT_TRUE + SPELT_FALSE:
        return f"write {'true' if word in SPELT_TRUE else 'false'}, without quotes"
    if accepts(annotation, list):
        return " or ".join([f"write [{text}]", *choices(annotation)])
    if not accepts(annotation, int, float):
        return ""
    if _is_number(text):
        return f"write {text.strip()} without quotes"
    number = _number_meant(text, is_float=accepts(annotation, float))
    return f"write {number}" if number else ""


def _number_meant(text: str, *, is_float: bool) -> str:
    """Returns the number that a text with thousands separators, a decimal comma or a unit means; empty for none."""
    if _THOUSANDS.fullmatch(text):
        return re.sub("[ ,_]", "", text)
    if is_float and _DECIMAL_COMMA.fullmatch(text):
        return text.replace(",", ".")
    number = _LEADING_NUMBER.match(text)
    return number[0] if number else ""


def _quoted(value: Any) -> str:
    if isinstance(value, dict | list) or value is None:
        return "write a single text"
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return f'put it in quotes: "{text}"'


def _is_number(text: str) -> bool:
    try:
        value = parse_value(text)
    except UserError:
        return False
    return isinstance(value, int | float) and not isinstance(value, bool)


def shown_value(value: Any) -> str:
    """Returns a value as it appears in a message: text in quotes and of limited length, collections by their kind."""
    if isinstance(value, dict):
        return "a block"
    if isinstance(value, list):
        return "a list"
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return str(value).lower()
    text = repr(value) if isinstance(value, str) else f"{value}"
    return text if len(text) <= 60 else f"{text[:57]}..."
