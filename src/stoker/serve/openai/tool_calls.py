"""Parsing of tool calls in a streamed answer. The chat template determines a family's format.

Text that looks like a call but cannot be parsed stays part of the text, so no output of the model is lost.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from stoker.generate.answer_text import overlap
from stoker.json_values import refuse_constant

# Keywords with which a schema says what other properties an object may have.
_OF_OTHERS = ("additionalProperties", "patternProperties", "unevaluatedProperties", "allOf", "anyOf", "oneOf", "$ref")
ALPHANUMERIC = string.ascii_letters + string.digits


@dataclass(frozen=True)
class ToolCall:
    """A tool call in an answer.

    Attributes:
        arguments: a JSON object, as text.
    """

    name: str
    arguments: str
    # Mistral's templates accept only ids of nine letters and digits; all others accept any.
    id: str = field(default_factory=lambda: "".join(secrets.choice(ALPHANUMERIC) for _ in range(9)))

    def as_json(self, index: int | None = None) -> dict[str, Any]:
        """Returns the call in the API's format; in a stream with its number."""
        called = {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}
        return called if index is None else {"index": index} | called


Read = Callable[[str, Mapping[str, Any]], list[ToolCall]]


@dataclass(frozen=True)
class ToolFormat:
    """A family's format of tool calls.

    Attributes:
        name: name of the format.
        begin: marks before calls.
        end: mark after a call; empty if calls last until the end of the answer.
        read: parses the calls in the text after the mark, given the tools' schemas by name.
        at_start: whether an answer that starts with ``{`` is a call too, if it names one of the tools.
    """

    name: str
    begin: tuple[str, ...]
    end: str
    read: Read
    at_start: bool = False


def _dumped(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # half a surrogate pair can be written only as an escape
        return json.dumps(value, allow_nan=False)
    return text


def _call_of(value: Any) -> ToolCall:
    """Parses a call written as an object with its name and arguments."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        raise ValueError("no call")
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(arguments, dict):
        raise ValueError("no arguments")
    value["name"].encode()  # a name with half a surrogate pair is a ValueError
    return ToolCall(value["name"], _dumped(arguments))


def _read_json(text: str, _: Mapping[str, Any]) -> list[ToolCall]:
    """Parses ``{"name": ..., "arguments": {...}}``, one or a list."""
    value = json.loads(text)
    return [_call_of(one) for one in (value if isinstance(value, list) else [value])]


def _read_several(text: str, _: Mapping[str, Any]) -> list[ToolCall]:
    """Parses consecutive objects, separated by white space, commas or semicolons."""
    calls, place, decoder = [], 0, json.JSONDecoder()
    while rest := text[place:].lstrip(" \t\r\n;,"):
        place = len(text) - len(rest)
        value, end = decoder.raw_decode(rest)
        calls.append(_call_of(value))
        place += end
    if not calls:
        raise ValueError("no call")
    return calls


def _read_mistral(text: str, schemas: Mapping[str, Any]) -> list[ToolCall]:
    """Parses a list of objects; or, from 2025 on, ``name[ARGS]{...}`` after a mark for each."""
    if text.lstrip().startswith("["):
        return _read_json(text, schemas)
    calls = []
    for part in text.split("[TOOL_CALLS]"):
        name, mark, arguments = part.partition("[ARGS]")
        if not mark:
            name, brace, rest = part.partition("{")
            arguments = brace + rest
        name = name.split("[CALL_ID]")[0].strip()
        calls.append(_call_of({"name": name, "arguments": json.loads(arguments)}))
    return calls


def _read_xml(text: str, schemas: Mapping[str, Any]) -> list[ToolCall]:
    """Parses ``<function=name><parameter=key>value</parameter></function>`` (Qwen3-Coder)."""
    found = re.fullmatch(r"\s*<function=([^>\s]+)>(.*)</function>\s*", text, re.DOTALL)
    if found is None:
        raise ValueError("no call")
    # Without text after the last end mark and with names of limited length, the search takes linear time.
    body = found[2][: found[2].rfind("</parameter>") + len("</parameter>")]
    pairs = re.findall(r"<parameter=([^>\s]{1,256})>\n?(.*?)\n?</parameter>", body, re.DOTALL)
    return [ToolCall(found[1], _dumped({key: _value(text, key, schemas.get(found[1])) for key, text in pairs}))]


def _read_glm(text: str, schemas: Mapping[str, Any]) -> list[ToolCall]:
    """Parses ``name<arg_key>key</arg_key><arg_value>value</arg_value>`` (GLM 4.5 and later)."""
    name = text.split("<arg_key>", maxsplit=1)[0].strip()
    if not re.fullmatch(r"[\w.:-]+", name):
        raise ValueError("no call")
    schema = schemas.get(name)
    return [ToolCall(name, _dumped({key: _value(value, key, schema) for key, value in _glm_pairs(text)}))]


def _glm_pairs(text: str) -> Iterator[tuple[str, str]]:
    """Yields the keys and values of a call, in linear time."""
    at = 0
    while (begin := text.find("<arg_key>", at)) >= 0 and (end := text.find("</arg_key>", begin)) >= 0:
        at = end + len("</arg_key>")
        if mark := re.compile(r"\s*<arg_value>").match(text, at):
            if (at := text.find("</arg_value>", mark.end())) < 0:
                return
            yield text[begin + len("<arg_key>") : end].strip(), text[mark.end() : at]


def _value(text: str, key: str, schema: Any) -> Any:
    """Parses a parameter given as text: as a string if the schema allows one, else as JSON."""
    properties = schema.get("properties") if isinstance(schema, dict) else None
    types = _types(properties.get(key)) if isinstance(properties, dict) else set()
    if "string" in types and not (text == "null" and "null" in types):
        return text
    try:
        return json.loads(text, parse_constant=refuse_constant)
    except ValueError:
        return text


def _types(schema: Any) -> set[str]:
    """Returns the types that a schema allows, alternatives included."""
    if not isinstance(schema, dict):
        return set()
    given = schema.get("type")
    types = {kind for kind in (given if isinstance(given, list) else [given]) if isinstance(kind, str)}
    for name in ("anyOf", "oneOf"):
        parts = schema.get(name)
        types.update(*map(_types, parts if isinstance(parts, list) else []))
    return types


HERMES = ToolFormat("hermes", ("<tool_call>",), "</tool_call>", _read_json)
XML = ToolFormat("xml", ("<tool_call>",), "</tool_call>", _read_xml)
GLM = ToolFormat("glm", ("<tool_call>",), "</tool_call>", _read_glm)
MISTRAL = ToolFormat("mistral", ("[TOOL_CALLS]",), "", _read_mistral)
LLAMA = ToolFormat("llama", ("<|python_tag|>",), "", _read_several, at_start=True)


def tool_format_of(template: str) -> ToolFormat | None:
    """Returns the format of a chat template's family; None for an unknown one."""
    if "<tool_call>" in template:
        if "<arg_key>" in template:
            return GLM
        return XML if "<function=" in template else HERMES
    if "[TOOL_CALLS]" in template:
        return MISTRAL
    if "<|python_tag|>" in template or ("ipython" in template and '"parameters"' in template):
        return LLAMA
    return None


class CallFinder:
    """Splits the text of an answer into plain text and tool calls."""

    def __init__(self, format: ToolFormat, schemas: Mapping[str, Any]) -> None:
        """
        Args:
            schemas: JSON schemas of the tools' parameters, by name.
        """
        self._format, self._schemas = format, schemas
        self._text = ""  # not returned yet
        self._inside = ""  # the mark that precedes the text
        self._said = False  # whether plain text other than white space came before

    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        """Adds text; returns the plain text and calls that are complete."""
        self._text += text
        said = ""
        calls: list[ToolCall] = []
        while True:
            if not self._inside:
                said += self._before_a_mark()
                if not self._inside:
                    return said, calls
            end = self._text.find(self._format.end) if self._format.end else -1
            if end < 0:
                return said, calls
            body, self._text = self._text[:end], self._text[end + len(self._format.end) :]
            mark, self._inside = self._inside, ""
            found = self._read(body)
            calls += found
            if not found:
                said += mark + body + self._format.end

    def finish(self) -> tuple[str, list[ToolCall]]:
        """Returns the remaining text and calls after the last token."""
        mark, self._inside = self._inside, ""
        text, self._text = self._text, ""
        calls = self._read(text) if mark else []
        if calls and (mark != "{" or all(call.name in self._schemas for call in calls)):
            return "", calls
        return (text if mark == "{" else mark + text), []  # the brace is not a mark but text

    def _before_a_mark(self) -> str:
        """Returns the text before the next mark, and removes both."""
        stripped = self._text.lstrip()
        if self._format.at_start and not self._said:
            if not stripped:
                return ""
            if stripped.startswith("{"):
                self._inside = "{"
                return ""
        places = [(self._text.find(mark), mark) for mark in self._format.begin if mark in self._text]
        if places:
            place, mark = min(places)
            said, self._text, self._inside = self._text[:place], self._text[place + len(mark) :], mark
        else:
            held = max(overlap(self._text, mark) for mark in self._format.begin)
            said, self._text = self._text[: len(self._text) - held], self._text[len(self._text) - held :]
        self._said = self._said or bool(said.strip())
        return said

    def _read(self, text: str) -> list[ToolCall]:
        try:
            return self._format.read(text, self._schemas)
        except (ValueError, RecursionError):
            return []


class ForcedCall:
    """Parser of an answer that a grammar restricts to one call in JSON."""

    def __init__(self) -> None:
        self._text = ""

    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        """Returns nothing before the end."""
        self._text += text
        return "", []

    def finish(self) -> tuple[str, list[ToolCall]]:
        """Returns the call; or the text, if it was truncated."""
        try:
            return "", _read_json(self._text, {})
        except (ValueError, RecursionError):
            return self._text, []


def forced_schema(tools: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Returns the JSON schema of a call of one of the named tools."""
    calls = []
    for number, name in enumerate(names):
        place = "/properties/arguments" if len(names) == 1 else f"/anyOf/{number}/properties/arguments"
        arguments = {"type": "object"} | _without_others(_moved(tools[name], place))
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": name}, "arguments": arguments},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    return calls[0] if len(calls) == 1 else {"anyOf": calls}


def _without_others(schema: dict[str, Any]) -> dict[str, Any]:
    """Returns the schema of arguments, limited to its properties unless it allows or requires others: a model may
    write an argument that is not named again and again.
    """
    named, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(named, dict) or not isinstance(required, list):  # none, or the schema is invalid
        return schema
    has_others = any(key in schema for key in _OF_OTHERS) or any(name not in [*named] for name in required)
    return schema if has_others else schema | {"additionalProperties": False}


def _moved(schema: Any, place: str) -> Any:
    """Returns a schema whose references from its root (``#/$defs/...``) lead to its new place in another schema."""
    if isinstance(schema, list):
        return [_moved(part, place) for part in schema]
    if not isinstance(schema, dict) or isinstance(schema.get("$id"), str):  # a schema with an id stays a root
        return schema
    found = {key: _moved(part, place) for key, part in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
        found["$ref"] = f"#{place}{reference[1:]}"
    return found
