"""Prompt templates with variables: read from a file, filled from rows, written as a chat template.

The file maps a name to a text, or to ``system`` and ``user`` texts::

    plain: "{question}"
    careful:
      system: Answer in one word.
      user: "Question: {question}"
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from string import Formatter
from typing import Any

from stoker.data.formats.expected_answer import as_text
from stoker.data.templates.chat_template import NONE
from stoker.errors import Problem, UserError, user_file_errors
from stoker.generate.open_model import OpenModel
from stoker.scoring.answer_rows import AnswerRow

PARTS = ("system", "user")
PROMPT = "prompt"  # the variable for the row's own prompt, where there is no such column


@dataclass(frozen=True)
class PromptTemplate:
    """A prompt with variables.

    Attributes:
        system, user: texts in which ``{name}`` is replaced by a column, ``{{`` and ``}}`` by braces; system may be
            empty.
    """

    name: str
    user: str
    system: str = ""

    @property
    def variables(self) -> tuple[str, ...]:
        """The columns that it uses, in the order of their first use."""
        named = (name for text in (self.system, self.user) for _, name in pieces_of(text) if name)
        return tuple(dict.fromkeys(named))

    def fill(self, row: AnswerRow) -> tuple[dict[str, Any], ...]:
        """Returns the conversation for a row.

        Raises:
            UserError: the row lacks a variable.
        """
        values = {name: self._value(name, row) for name in self.variables}
        turns = [{"role": "user", "content": _filled(self.user, values)}]
        return tuple([{"role": "system", "content": _filled(self.system, values)}] * bool(self.system) + turns)

    def _value(self, name: str, row: AnswerRow) -> str:
        if name in row.fields and row.fields[name] is not None:
            return as_text(row.fields[name])
        if name == PROMPT and row.turns:
            return str(row.turns[-1]["content"])
        columns = ", ".join(row.fields)
        raise UserError(row.problem(f"the template {self.name} reads {{{name}}}", f"the row has {columns}"))


def pieces_of(text: str) -> list[tuple[str, str]]:
    """Splits a text into (literal, variable after it); the last variable may be empty.

    Raises:
        ValueError: braces do not match, or a variable is not a plain name.
    """
    pieces = []
    for literal, name, form, conversion in Formatter().parse(text):
        if name is not None and (not name.isidentifier() or form or conversion):
            raise ValueError(f"{{{name}}} is not a plain name of a column")
        pieces.append((literal, name or ""))
    return pieces


def _filled(text: str, values: dict[str, str]) -> str:
    return "".join(literal + values.get(name, "") for literal, name in pieces_of(text))


def read_templates(path: str, base: Path) -> list[PromptTemplate]:
    """Reads the templates of a YAML or JSON file.

    Raises:
        UserError: it cannot be read, has fewer than two templates, or a template is malformed.
    """
    from ruamel.yaml import YAML

    with user_file_errors(path):
        content = YAML(typ="safe").load((base / path).read_text(encoding="utf-8"))
    if not isinstance(content, dict) or len(content) < 2:
        hint = "map a name to each: plain: '{question}'"
        raise UserError(Problem("it does not hold several templates", hint, file=path))
    problems = []
    templates = []
    for name, value in content.items():
        parts = {"user": value} if isinstance(value, str) else value
        if not isinstance(parts, dict) or not set(parts) <= set(PARTS) or not isinstance(parts.get("user"), str):
            problems.append(
                Problem(f"{name} is not a template", "write a text, or the keys system and user", file=path)
            )
            continue
        template = PromptTemplate(str(name), parts["user"], str(parts.get("system") or ""))
        try:
            if not template.variables:
                problems.append(Problem(f"{name} reads no column", "write {prompt} where it goes", file=path))
        except ValueError as error:
            hint = "write {{ and }} for braces in the text"
            problems.append(Problem(f"{name}: {error}", hint, file=path))
        templates.append(template)
    if problems:
        raise UserError(*problems)
    return templates


def as_chat_template(template: PromptTemplate, model: OpenModel) -> str:
    """Writes the template as a chat template around the model's own.

    The content of a user's turn is the value of the one variable. With several variables, it is the row's ``prompt``,
    and the others are read from fields of the turn. A turn without them is refused.
    """
    own = model.codec.template.source if model.chats else NONE
    content = template.variables[0] if len(template.variables) == 1 else PROMPT

    def expression(text: str) -> str:
        parts = []
        for literal, name in pieces_of(text):
            parts += [json.dumps(literal, ensure_ascii=False)] if literal else []
            if name:
                parts.append(f"_turn[{json.dumps('content' if name == content else name)}]")
        return " ~ ".join(parts) or "''"

    fields = [json.dumps(name) for name in template.variables if name != content]
    check = "".join(
        f"{{%- if _turn['role'] == 'user' and _turn[{name}] is not defined -%}}"
        f"{{{{- raise_exception('a user turn has no field ' ~ {name}) -}}}}{{%- endif -%}}"
        for name in fields
    )
    system = ""
    if template.system:
        system = (
            "{%- if not _wrapped.system and _turn['role'] == 'user' -%}"
            f"{{%- set _turn_system = {expression(template.system)} -%}}"
            "{%- set _wrapped.messages = _wrapped.messages + [{'role': 'system', 'content': _turn_system}] -%}"
            "{%- set _wrapped.system = true -%}{%- endif -%}"
        )
    return (
        "{%- set _wrapped = namespace(messages=[], system=false) -%}"
        "{%- for _turn in messages -%}"
        f"{check}{system}"
        "{%- if _turn['role'] == 'user' -%}"
        f"{{%- set _text = {expression(template.user)} -%}}"
        "{%- set _wrapped.messages = _wrapped.messages + [{'role': 'user', 'content': _text}] -%}"
        "{%- else -%}{%- set _wrapped.messages = _wrapped.messages + [_turn] -%}{%- endif -%}"
        "{%- endfor -%}"
        "{%- set messages = _wrapped.messages -%}\n"
        f"{own}"
    )
