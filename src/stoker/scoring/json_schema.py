"""Score of JSON in an answer by a JSON schema: 1 where the value fits.

The schema's patterns are those of the package regex and have the time limit of `stoker.scoring.patterns`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

from stoker.errors import Problem, UserError, placed_errors, reason_of, user_file_errors
from stoker.json_values import refuse_constant
from stoker.scoring.answer_rows import AnswerRow
from stoker.scoring.patterns import compiled, is_found
from stoker.scoring.scorer import Score, Scorer, require_package

FENCE = "```"
TOO_DEEP = "the JSON schema is nested too deeply"
MOST_REFERENCES = 100_000  # followed for one answer: references to references can multiply without end
REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")

_followed: ContextVar[Iterator[int]] = ContextVar("_followed")  # counts the references of an answer


class _TooManyReferences(Exception):
    """An answer needs more references than are followed."""


def json_schema_scorer(name: str, argument: str, base: Path) -> Scorer:
    """Returns the scorer ``json_schema``, or ``json_schema:FILE``.

    Raises:
        UserError: the file is not a JSON schema, or the package jsonschema is not installed.
    """
    require_package("jsonschema", name)
    schema = check_schema_file(name, argument, base)
    if argument:
        check = _validator(schema, argument)
        return Scorer(name, lambda answer, row: _fits(check, answer, argument))
    return Scorer(name, _fits_own)


def check_schema_file(name: str, argument: str, base: Path) -> Any:
    """Returns the content of the file of ``json_schema:FILE``. Raises UserError if it is not JSON."""
    if not argument:
        return None
    with user_file_errors(f"the schema {argument}"):
        return json.loads((base / argument).read_text(encoding="utf-8"))


def _fits_own(answer: str, row: AnswerRow) -> Score:
    schema = row.expected
    try:
        schema = json.loads(schema) if isinstance(schema, str) else schema
    except ValueError as error:
        raise UserError(row.problem(f"the expected value is not valid JSON: {error}")) from error
    except RecursionError as error:
        raise UserError(row.problem(TOO_DEEP)) from error
    place = f"{row.source}:{row.row}"
    return _fits(_validator(schema, place), answer, place)


def _validator(schema: Any, place: str) -> Any:
    """Returns a validator that loads nothing that a schema refers to."""
    from jsonschema.exceptions import SchemaError
    from jsonschema.validators import Draft202012Validator, validator_for
    from referencing import Registry

    if not isinstance(schema, dict | bool):
        raise UserError(Problem("a JSON schema is an object", file=place))
    if isinstance(schema, dict) and not isinstance(schema.get("$schema", ""), str):
        raise UserError(Problem("not a JSON schema: its $schema is not a text", file=place))
    kind = validator_for(schema, default=Draft202012Validator)
    try:
        kind.check_schema(schema)
    except SchemaError as error:
        raise UserError(Problem(f"not a JSON schema: {reason_of(error)}", file=place)) from error
    except RecursionError as error:
        raise UserError(Problem(TOO_DEEP, file=place)) from error
    return _with_time_limit(kind)(schema, registry=Registry())


@cache
def _with_time_limit(kind: Any) -> Any:
    """Returns a draft's validator with limits: a time for its patterns, a number of references for each answer."""
    from jsonschema.validators import extend

    keywords = {
        "pattern": _pattern,
        "patternProperties": _pattern_properties,
        "additionalProperties": _additional_properties,
    }
    keywords |= {name: _counted(kind.VALIDATORS[name]) for name in REFERENCES if name in kind.VALIDATORS}
    return extend(kind, {name: own for name, own in keywords.items() if name in kind.VALIDATORS})


def _counted(follow: Callable[..., Iterable[Exception] | None]) -> Callable[..., Iterator[Exception]]:
    """Returns the check of a reference, which raises _TooManyReferences beyond `MOST_REFERENCES`."""

    def check(validator: Any, reference: str, value: Any, schema: Any) -> Iterator[Exception]:
        if next(_followed.get()) >= MOST_REFERENCES:
            raise _TooManyReferences
        try:
            yield from follow(validator, reference, value, schema) or ()
        except AttributeError as error:  # the library takes what it leads to for an object
            raise UserError(f"the JSON schema's reference {reference} does not lead to a schema") from error

    return check


def _pattern(validator: Any, pattern: str, value: Any, schema: Any) -> Iterator[Exception]:
    from jsonschema.exceptions import ValidationError

    if validator.is_type(value, "string") and not is_found(compiled(pattern), value):
        yield ValidationError(pattern)


def _pattern_properties(validator: Any, by_pattern: dict[str, Any], value: Any, schema: Any) -> Iterator[Exception]:
    if validator.is_type(value, "object"):
        for pattern, own in by_pattern.items():
            for name in value:
                if is_found(compiled(pattern), name):
                    yield from validator.descend(value[name], own, path=name, schema_path=pattern)


def _additional_properties(validator: Any, additional: Any, value: Any, schema: Any) -> Iterator[Exception]:
    if not validator.is_type(value, "object"):
        return
    patterns = [compiled(pattern) for pattern in schema.get("patternProperties", {})]
    for name in value:
        if name not in schema.get("properties", {}) and not any(is_found(pattern, name) for pattern in patterns):
            yield from validator.descend(value[name], additional, path=name)


def _fits(validator: Any, answer: str, place: str) -> Score:
    """Scores an answer; 0 where it is not JSON, or more deeply nested or larger than can be checked.

    Args:
        place: of the schema, for errors.
    """
    from referencing.exceptions import Unresolvable

    try:
        value = json.loads(_without_fence(answer.strip()), parse_constant=refuse_constant)
        _followed.set(count())
        with placed_errors(lambda problem: Problem(problem.message, problem.suggestion, file=place)):
            return Score(float(validator.is_valid(value)))
    except _TooManyReferences:
        return Score(0.0, f"the JSON schema needs more than {MOST_REFERENCES:,} references for one answer")
    except (ValueError, OverflowError, RecursionError):
        return Score(0.0)
    except Unresolvable as error:
        raise UserError(Problem(f"the JSON schema has an unresolved $ref: {error.ref}", file=place)) from error


def _without_fence(answer: str) -> str:
    """Returns the content of an answer that is one code fence, with or without the language json."""
    if len(answer) < 2 * len(FENCE) or not (answer.startswith(FENCE) and answer.endswith(FENCE)):
        return answer
    language, newline, content = answer.removeprefix(FENCE).removesuffix(FENCE).partition("\n")
    return content if newline and language.strip() in ("", "json") else answer
