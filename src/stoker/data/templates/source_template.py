"""The chat template of a source: the tokenizer's own, a built-in one, a file, or strings; with its arguments."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2.meta import find_undeclared_variables

from stoker.data.templates import template_sandbox
from stoker.data.templates.chat_template import BUILT_IN
from stoker.data.templates.template_environment import check_template, environment
from stoker.errors import Problem, UserError
from stoker.job.blocks.source_block import SourceBlock, TemplateBlock
from stoker.job.role_template import to_jinja

LONGEST_NAME = 80  # characters of a name in an error

# The variables that every rendering passes to a template.
GIVEN = frozenset({"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"})


def template_of(block: SourceBlock, base: Path, *, own: str) -> str:
    """Returns the chat template of a source in Jinja.

    Args:
        own: the tokenizer's.

    Raises:
        UserError: with the key within the source's block: there is no such template, it is not valid Jinja, or it reads
            no such argument.
    """
    name = block.template
    if isinstance(name, TemplateBlock):
        return to_jinja(name)
    source = own if name == "auto" else BUILT_IN.get(name) or _read(name, base)
    try:
        check_template(source)
    except ValueError as error:
        message = str(error) if name == "auto" else f"{name}: {error}"
        raise UserError(Problem(message, "see data[].template for others", key="template")) from error
    known = sorted(template_sandbox.arguments_of(source)) if block.template_arguments else []
    unknown = [argument for argument in block.template_arguments if argument not in known]
    if unknown:
        message = f"the chat template reads no argument {', '.join(map(repr, unknown))}"
        reads = f"it reads {', '.join(known)}" if known else "it reads no argument at all"
        raise UserError(Problem(message, reads, key="template_arguments"))
    return with_arguments(source, block.template_arguments)


def _read(name: str, base: Path) -> str:
    path = base / name
    if not os.path.isfile(path):  # noqa: PTH113 -- Path.is_file() raises for names too long
        known = ", ".join(["auto", *BUILT_IN])
        advice = f"write one of {known}, or the path of a .jinja file"
        shown = name if len(name) <= LONGEST_NAME else f"{name[:LONGEST_NAME]} ..."
        raise UserError(Problem(f"there is no chat template {shown!r}", advice, key="template"))
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(Problem(f"the chat template cannot be read: {error}", file=name)) from error


def arguments_of(source: str) -> set[str]:
    """Returns the variables that a template reads in addition to those that every rendering sets.

    Finding them evaluates the template's constants: see `stoker.data.templates.template_sandbox`.
    """
    sandbox = environment()
    names = find_undeclared_variables(sandbox.parse(source)) - GIVEN - sandbox.globals.keys()
    return {name for name in names if not name.endswith("_token")}


def with_arguments(source: str, arguments: Mapping[str, Any]) -> str:
    """Returns the template with default values for its arguments."""
    lines = (
        f"{{% if {name} is not defined %}}{{% set {name} = {_literal(value)} %}}{{% endif %}}\n"
        for name, value in arguments.items()
    )
    return "".join(lines) + source


def _literal(value: Any) -> str:
    """Returns a value of a job file as Jinja writes it."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_literal(str(key))}: {_literal(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_literal, value)) + "]"
    if value is None:
        return "none"
    return json.dumps(value, ensure_ascii=False)
