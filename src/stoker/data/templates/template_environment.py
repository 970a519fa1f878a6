"""The Jinja sandbox that chat templates are compiled and rendered in: options and names as in transformers."""

from __future__ import annotations

import json
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from stoker.errors import LONGEST_REASON

LONGEST_TEMPLATE = 1 << 20  # characters


class TemplateRefused(Exception):
    """The template refuses this conversation: it raised, or it needs a missing field."""

    def __init__(self, reason: object) -> None:
        super().__init__(str(reason)[:LONGEST_REASON])  # it is the template's, and goes through a pipe


class InvalidTemplate(ValueError):
    """The template is not valid Jinja."""


class _Generation(Extension):
    """``{% generation %}`` marks answers for other tools; here its body is rendered unchanged."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as a plain class attribute

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_through"), [], [], body).set_lineno(line)

    def _through(self, caller: Any) -> str:
        return caller()


class _Sandbox(ImmutableSandboxedEnvironment):
    """The sandbox with a shortcut for the most frequent check: a loop hides only private names."""

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if type(obj) is LoopContext:
            return not attr.startswith("_")
        return super().is_safe_attribute(obj, attr, value)


def _refuse(message: str) -> None:
    raise TemplateRefused(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def environment() -> jinja2.Environment:
    """Returns the sandbox that transformers renders templates in: same options, same names."""
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def check_template(source: str) -> None:
    """Parses a template, without executing any of it.

    Raises:
        InvalidTemplate: when it is not valid Jinja, or too large.
    """
    if len(source) > LONGEST_TEMPLATE:
        raise InvalidTemplate(f"the chat template is longer than {LONGEST_TEMPLATE:,} characters")
    try:
        environment().parse(source)
    except jinja2.TemplateSyntaxError as error:
        raise InvalidTemplate(f"the chat template is not valid Jinja: {error} (line {error.lineno})") from error
    except RecursionError as error:
        raise InvalidTemplate("the chat template is not valid Jinja: it is nested too deeply") from error


@lru_cache(maxsize=16)
def compile_template(source: str) -> jinja2.Template:
    """Compiles a template for rendering. Compiling evaluates its constants: see `template_sandbox`.

    Raises:
        InvalidTemplate: when the template is not valid Jinja.
    """
    check_template(source)
    try:
        template = environment().from_string(source)
    except MemoryError:
        raise
    except Exception as error:  # templates are foreign programs: they may raise anything
        raise InvalidTemplate(f"the chat template is not valid Jinja: {error or type(error).__name__}") from error
    template.globals = dict(template.globals)  # each rendering copies them, and a chain of maps is slow to copy
    return template
