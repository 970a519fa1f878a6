"""Arguments of chat templates, written into the template, so that it is served as it was trained."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from jinja2.meta import find_undeclared_variables

from stoker.data.chat import environment

# What every rendering gives to a template by itself.
GIVEN = frozenset({"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"})


def arguments_of(source: str) -> set[str]:
    """The variables that a template reads beside those that every rendering gives it."""
    sandbox = environment()
    names = find_undeclared_variables(sandbox.parse(source)) - GIVEN - sandbox.globals.keys()
    return {name for name in names if not name.endswith("_token")}


def with_arguments(source: str, arguments: Mapping[str, Any]) -> str:
    """The template with values for its arguments; whoever renders it may still give others."""
    lines = (
        f"{{% if {name} is not defined %}}{{% set {name} = {_literal(value)} %}}{{% endif %}}\n"
        for name, value in arguments.items()
    )
    return "".join(lines) + source


def _literal(value: Any) -> str:
    """A value of a job file as Jinja writes it."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_literal(str(key))}: {_literal(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_literal, value)) + "]"
    if value is None:
        return "none"
    return json.dumps(value, ensure_ascii=False)
