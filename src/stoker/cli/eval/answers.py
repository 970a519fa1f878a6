"""``stoker eval --answers``: the user's own rows, scored."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stoker.cli.eval.report import finish
from stoker.cli.options.run_options import trusted
from stoker.evaluate.ask_model import AskSettings
from stoker.evaluate.scored_answers import Questions, ScoredAnswer, answer, details, mean_figures, open_questions
from stoker.generate.open_model import OpenModel, open_model
from stoker.runs.evaluations import KeptEvaluation
from stoker.scoring.answer_rows import read_answer_rows
from stoker.scoring.judge import UNCLEAR

DEFAULT_SCORERS = ("exact", "normalised")
EVERY = 10.0  # seconds between two lines of progress


def settings_of(arguments: argparse.Namespace) -> AskSettings:
    """Returns the sampling settings of the answers."""
    return AskSettings(arguments.temperature, arguments.seed, arguments.max_tokens)


def questions_of(arguments: argparse.Namespace) -> Questions:
    """Reads the rows and scorers of the command line, before a model is loaded."""
    rows = read_answer_rows(arguments.answers, Path.cwd(), limit=arguments.limit)
    return open_questions(rows, tuple(arguments.score or DEFAULT_SCORERS), Path.cwd())


def model_of(arguments: argparse.Namespace) -> OpenModel:
    """Opens the model of the command line."""
    return open_model(arguments.run, Path.cwd(), at=arguments.at, trusted=trusted(arguments))


class AnswerProgress:
    """Prints the number of a model's answers on stderr: every `EVERY` seconds, and when all have ended."""

    def __init__(self, questions: Questions, of: str = "") -> None:
        self._rows, self._of = len(questions.rows.rows), of
        self._done, self._printed = 0, time.monotonic()

    def __call__(self, number: int, text: str) -> None:
        """Counts an answer that has ended."""
        self._done += 1
        is_last = self._done == self._rows
        if is_last or time.monotonic() - self._printed >= EVERY:
            count = f"{self._of}answered {self._done:,} of {self._rows:,} rows"
            print(f"{count}; scoring ..." if is_last else f"{count} ...", file=sys.stderr, flush=True)
            self._printed = time.monotonic()


def run_answers(arguments: argparse.Namespace) -> int:
    """Generates answers, scores them, and stores and prints the results."""
    questions = questions_of(arguments)
    model = model_of(arguments)
    answers = answer(model, questions, settings_of(arguments), finished=AnswerProgress(questions))
    found = KeptEvaluation(
        kind="answers",
        time=time.time(),
        model=model.name,
        step=model.step,
        data=questions.as_json(),
        asked={"score": list(questions.chosen), **settings_of(arguments).as_json()},
        figures=tuple(mean_figures(answers, list(questions.scorers))),
        details=details(answers, questions),
    )
    return finish(
        arguments, found, [a.as_json() for a in answers], notes(answers, questions) + judge_notes(found.details)
    )


def notes(answers: Sequence[ScoredAnswer], questions: Questions) -> list[str]:
    """Returns the notes beside the figures."""
    counts = details(answers, questions)
    lines = [f"{counts['rows']} rows of {questions.rows.path}"]
    if without := counts["rows_without_expected"]:
        lines.append(f"{without} of them have no expected answer: scorers that need one skip them")
    if cut := counts["answers_cut"]:
        lines.append(f"{cut} answers were truncated at --max-tokens")
    return lines


def judge_notes(counts: Mapping[str, Any], of: str = "") -> list[str]:
    """Returns the note on the numbers of verdicts, if judges were asked."""
    if "judge" not in counts:
        return []
    verdicts = ", ".join(f"{count} {verdict}" for verdict, count in counts["judge"].items())
    return [f"{of}judge: {verdicts}" + (", which no figure counts" if counts["judge"][UNCLEAR] else "")]
