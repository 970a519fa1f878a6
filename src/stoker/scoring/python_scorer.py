"""The scorer ``python:MODULE:FUNCTION``: a user's function computes the score.

``function(answer, expected, row)`` returns a number for one answer; ``row`` has all columns of its row. A function with
a parameter ``answers`` receives lists, for those of the parameters ``answers``, ``expected`` and ``rows`` that it has,
and returns a list of numbers, or None for answers to which it does not apply; these score 0. One with a parameter
``completions`` or ``completion_ids`` is called as TRL calls its reward functions: with lists for ``prompts``,
``completions``, ``completion_ids`` (of rewards) and every column by name, and None for ``trainer_state``. As a reward,
list functions are called for all answers that one process scores together, the answers to a prompt consecutively; in
``stoker eval`` for one answer at a time.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import math
import reprlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from functools import partial, reduce
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from stoker.errors import CodeFailed, Problem, UserError, did_you_mean, raised_in, reason_of, typed_reason
from stoker.resilience.stop_signals import SignalExit
from stoker.scoring.answer_rows import AnswerRow
from stoker.scoring.scorer import Score, Scorer

LISTS = ("answers", "expected", "rows")
TRL = ("completions",)  # lists of a function that is called as TRL calls it
LARGEST = 3.4e38  # about the largest number of float32, beyond which means and variances overflow
NOT_HERE = "is it in this folder?"
DYNAMIC = ("globals", "locals", "vars", "setattr", "exec")  # with which a module may define other names


def python_scorer(name: str, argument: str, base: Path) -> Scorer:
    """Returns the scorer of a function in a module of ``base`` or of an installed package.

    Raises:
        UserError: the function does not exist.
    """
    function = python_function(name, argument, base)
    taken = _lists_taken(function)
    if not taken:
        _require_parameters(name, function)
        return Scorer(name, partial(_call, name, function))
    batch = partial(_call_batch, name, function, taken)
    return Scorer(name, lambda answer, row: batch([answer], [row])[0], batch=batch)


def python_function(name: str, argument: str, base: Path) -> Callable[..., Any]:
    """Imports the function MODULE:FUNCTION from a module of ``base`` or of an installed package.

    Raises:
        UserError: it does not exist.
    """
    module_name, path = _module_and_path(name, argument)
    if str(base) not in sys.path:
        sys.path.insert(0, str(base))
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise UserError(Problem(f"{name}: there is no module {error.name!r}", NOT_HERE)) from error
    except SignalExit:
        raise
    except (Exception, SystemExit) as error:
        raise UserError(f"{name}: importing {module_name} raised {typed_reason(error)}") from error
    try:
        function = reduce(getattr, path.split("."), module)
    except AttributeError as error:
        raise UserError(f"{name}: {module_name} has no {path!r}") from error
    if not callable(function):
        raise UserError(f"{name}: {path} is not a function")
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        raise UserError(Problem(f"{name}: {path} is an async function", "write it with `def` alone"))
    return function


def _module_and_path(name: str, argument: str) -> tuple[str, str]:
    module_name, _, path = argument.partition(":")
    if not module_name or not path:
        raise UserError(Problem(f"{name!r} is incomplete", "write python:MODULE:FUNCTION"))
    return module_name, path


def check_function(name: str, argument: str, base: Path) -> None:
    """Checks that a function's module exists, and defines it if it is in ``base``, without importing it.

    Raises:
        UserError: a reason is seen why there is no such function.
    """
    module_name, path = _module_and_path(name, argument)
    file = _module_file(name, module_name, base)
    if file is None:
        return
    try:
        names = _top_level(ast.parse(file.read_bytes()))
    except (OSError, SyntaxError, ValueError) as error:
        raise UserError(Problem(f"{name}: {file.name} cannot be read: {reason_of(error)}")) from error
    wanted = path.partition(".")[0]
    if names is not None and wanted not in names:
        hint = did_you_mean(wanted, names, 0.6) or f"define it in {file.name}"
        raise UserError(Problem(f"{name}: {file.name} has no {wanted!r}", hint))


def _module_file(name: str, module_name: str, base: Path) -> Path | None:
    """Returns the file of a module in ``base``; None for one of an installed package.

    Raises:
        UserError: there is no such module. Below an installed package only the package is looked for.
    """
    parts = module_name.split(".")
    spec, places = None, (str(base), *sys.path)
    for count, part in enumerate(parts, 1):
        whole = ".".join(parts[:count])
        spec = PathFinder.find_spec(whole, places) if part.isidentifier() else None
        if spec is None and whole.isidentifier() and (whole in sys.modules or importlib.util.find_spec(whole)):
            return None  # built in, or found by an importer of its own
        if spec is None:
            raise UserError(Problem(f"{name}: there is no module {whole!r}", NOT_HERE))
        places = tuple(spec.submodule_search_locations or ())
        if count == 1 and Path(spec.origin or places[0]).parent not in (base, base / part):
            return None
    return Path(spec.origin) if spec is not None and spec.origin and spec.origin.endswith(".py") else None


def _top_level(module: ast.Module) -> set[str] | None:
    """Returns the names that a module's own statements define; None if it may have others."""
    names: set[str] = set()
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and (isinstance(node.ctx, ast.Store) or node.id in DYNAMIC):
            names.add(node.id)
    return None if names & {"*", "__getattr__", *DYNAMIC} else names


def _signature(function: Callable[..., Any]) -> inspect.Signature | None:
    """Returns a function's signature; None for some C functions, which have no readable one."""
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        return None


def _require_parameters(name: str, function: Callable[..., Any]) -> None:
    """Raises a `UserError` where a function cannot be called with an answer, what was expected, and the row."""
    signature = _signature(function)
    try:
        if signature is not None:
            signature.bind("", None, {})
    except TypeError as error:
        hint = "give it the parameters (answer, expected, row), or (answers, expected, rows) for lists"
        raise UserError(Problem(f"{name} has the parameters {signature}: {error}", hint)) from error


def _lists_taken(function: Callable[..., Any]) -> tuple[str, ...]:
    """Returns the lists that a function takes; none if it scores one answer."""
    signature = _signature(function)
    parameters = signature.parameters if signature is not None else {}
    if {"completions", "completion_ids"} & set(parameters):
        return TRL
    if "answers" not in parameters:
        return ()
    every = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    return tuple(name for name in LISTS if every or name in parameters)


def _call(name: str, function: Callable[..., Any], answer: str, row: AnswerRow) -> Score:
    try:
        value = function(answer, row.expected, dict(row.fields))
    except SignalExit:
        raise
    except (Exception, SystemExit) as error:
        raise CodeFailed(row.problem(f"{name} raised {raised_in(error)}")) from error
    return _score(name, value, row)


def _call_batch(
    name: str,
    function: Callable[..., Any],
    taken: Sequence[str],
    answers: Sequence[str],
    rows: Sequence[AnswerRow],
    ids: Sequence[Sequence[int]] | None = None,
) -> list[Score]:
    lists = _as_trl(function, answers, rows, ids) if taken == TRL else _lists(taken, answers, rows)
    what = f"{name}, called with {len(rows)} answers, the first to this row,"
    try:
        returned = function(**lists)
        values = list(returned) if _is_list(returned) else None  # a generator runs the user's code
    except SignalExit:
        raise
    except (Exception, SystemExit) as error:
        raise CodeFailed(rows[0].problem(f"{what} raised {raised_in(error)}")) from error
    if values is None:
        shown = reprlib.repr(returned)
        raise CodeFailed(rows[0].problem(f"{what} returned {shown}", "give a list of one number for each answer"))
    if len(values) != len(rows):
        raise CodeFailed(rows[0].problem(f"{what} returned {len(values)} numbers", "give one for each answer"))
    return [Score(0.0) if value is None else _score(name, value, row) for value, row in zip(values, rows, strict=True)]


def _is_list(value: Any) -> bool:
    """Returns whether a value has items in the order of the answers: a list, a tuple, an array, a tensor."""
    if isinstance(value, str | bytes | Mapping | Set) or getattr(value, "ndim", 1) == 0:
        return False
    return isinstance(value, Iterable)


def _lists(taken: Sequence[str], answers: Sequence[str], rows: Sequence[AnswerRow]) -> dict[str, Any]:
    lists = {
        "answers": list(answers),
        "expected": [row.expected for row in rows],
        "rows": [dict(row.fields) for row in rows],
    }
    return {name: lists[name] for name in taken}


def _as_trl(
    function: Callable[..., Any],
    answers: Sequence[str],
    rows: Sequence[AnswerRow],
    ids: Sequence[Sequence[int]] | None,
) -> dict[str, Any]:
    """Returns the arguments of TRL's reward functions; answers to prompts given as messages are messages too."""
    names = sorted({name for row in rows for name in row.fields} - {"prompt"})
    chats = [isinstance(row.fields.get("prompt"), list) for row in rows]
    found: dict[str, Any] = {name: [row.fields.get(name) for row in rows] for name in names} | {
        "prompts": [row.fields.get("prompt") for row in rows],
        "completions": [
            [{"role": "assistant", "content": answer}] if chat else answer
            for answer, chat in zip(answers, chats, strict=True)
        ],
        "trainer_state": None,
    }
    if ids is not None:
        found["completion_ids"] = [list(each) for each in ids]
    parameters = inspect.signature(function).parameters
    every = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    return {name: values for name, values in found.items() if every or name in parameters}


def _score(name: str, value: Any, row: AnswerRow) -> Score:
    """Returns the score of a number of any kind, such as numpy's, or a tensor of one."""
    number = math.nan
    if not isinstance(value, str | bytes):
        with suppress(Exception):  # whatever the user's own type raises
            number = float(value)
    if not abs(number) <= LARGEST:
        hint = "a function must return a finite number of at most 3.4e38, or True or False"
        raise CodeFailed(row.problem(f"{name} returned {value!r}", hint))
    return Score(number)
