"""Score of a program in an answer by a row's unit tests, in the sandbox.

The tests are in the row's column ``tests``, ``test`` or ``test_list``: Python that raises where the program is wrong,
or a list of such. With a column ``entry_point`` they have HumanEval's format (Chen et al., 2021): the prompt starts the
function, and ``test`` defines ``check``, which is called with it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from stoker.errors import CannotRun, Problem, UserError
from stoker.scoring.answer_rows import AnswerRow
from stoker.scoring.sandbox import SECONDS, run_program, sandbox_problem
from stoker.scoring.scorer import Score, Scorer

LONGEST = 600  # seconds

TESTS = ("tests", "test", "test_list")
_FENCE = re.compile(r"```[ \t]*+[\w+-]*+[ \t]*+\n(.*?)(?:\n[ \t]*+```|\Z)", re.DOTALL)


def code_scorer(name: str, argument: str, base: Path) -> Scorer:
    """Returns the scorer ``code``, or ``code:SECONDS``.

    Raises:
        UserError: SECONDS is not a time limit.
        CannotRun: this system has no sandbox.
    """
    if problem := sandbox_problem():
        raise CannotRun(Problem(f"the scorer {name} runs programs of the model, and {problem}"))
    check_time_limit(name, argument, base)
    return Scorer(name, partial(_tested, float(argument or SECONDS)), waits=True)


def check_time_limit(name: str, argument: str, base: Path) -> None:
    """Raises UserError if the argument of ``code:SECONDS`` is not a time limit."""
    if argument and not (argument.isdecimal() and 0 < int(argument) <= LONGEST):
        hint = f"write a whole number of seconds up to {LONGEST}: code:5"
        raise UserError(Problem(f"the time limit {argument!r} is not a number", hint))


def _tested(seconds: float, answer: str, row: AnswerRow) -> Score:
    if problem := problem_of_tests(row):
        raise UserError(problem)
    if not answer.strip():
        return Score(0.0, "empty")
    outcome = run_program(program_of(answer, row.fields), seconds=seconds)
    return Score(float(outcome.passed), outcome.why)


def problem_of_tests(row: AnswerRow) -> Problem | None:
    """Returns why a row has no usable tests; None if it has."""
    name = _column(row.fields)
    if name is None:
        return row.problem("the scorer code runs unit tests, and this row has none", "give it a column `tests`")
    value, entry = row.fields[name], row.fields.get("entry_point")
    if not isinstance(value, str) and not (isinstance(value, list) and all(isinstance(v, str) for v in value)):
        return row.problem(f"{name} is neither Python nor a list of lines of Python")
    if entry is not None and not (isinstance(entry, str) and entry.isidentifier()):
        return row.problem(f"entry_point is not a name of a function: {entry!r}")
    return None


def program_of(answer: str, fields: Mapping[str, Any]) -> str:
    """Returns the answer's program followed by the row's tests.

    The program is the content of the answer's first code fence, or the whole answer. It continues HumanEval's prompt;
    if it defines the function itself, it follows the prompt, for its imports and helpers.
    """
    name = _column(fields)
    assert name is not None, "problem_of_tests was asked"
    tests = fields[name] if isinstance(fields[name], str) else "\n".join(fields[name])
    fenced = _FENCE.search(answer)
    code, entry = fenced[1] if fenced else answer, fields.get("entry_point")
    if entry is None:
        return f"{code}\n\n{tests}\n"
    prompt = fields.get("prompt")
    begun = prompt if isinstance(prompt, str) and _is_python(prompt) else ""
    between = "\n" if re.search(rf"^(?:async )?def {re.escape(entry)}\b", code, re.MULTILINE) else ""
    call = "" if re.search(rf"^check\({re.escape(entry)}\)", tests, re.MULTILINE) else f"check({entry})"
    return f"{begun}{between}{code}\n\n{tests}\n{call}\n"


def _column(fields: Mapping[str, Any]) -> str | None:
    return next((name for name in TESTS if fields.get(name)), None)


def _is_python(text: str) -> bool:
    try:
        ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True
