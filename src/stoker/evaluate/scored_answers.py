"""Scored answers to the user's rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from stoker.evaluate.ask_model import AskSettings, ask, prompts_of
from stoker.evaluate.intervals import Mean, mean_interval, mean_of
from stoker.generate.open_model import OpenModel
from stoker.runs.evaluations import Figure
from stoker.scoring.answer_rows import AnswerRow, AnswerRows
from stoker.scoring.concurrent_calls import ConcurrentCalls
from stoker.scoring.judge import VERDICTS, Judge
from stoker.scoring.scorer import Score, Scorer
from stoker.scoring.scorers import UNTRIED, scorers_of


@dataclass(frozen=True)
class ScoredAnswer:
    """An answer with its scores.

    Attributes:
        finish: ``stop`` or ``length``.
        scores: scores by scorer; those that need an expected answer are missing where the row has none.
    """

    row: AnswerRow
    turns: tuple[dict[str, Any], ...]
    text: str
    finish: str
    scores: Mapping[str, Score]

    def value(self, name: str) -> float | None:
        """Returns the score by a scorer; None if there is none that counts."""
        score = self.scores.get(name)
        return score.value if score is not None and score.counts else None

    def as_json(self) -> dict[str, Any]:
        """Returns the row for the results file; a score that does not count is null."""
        why = {name: score.why for name, score in self.scores.items() if score.why}
        return {
            "source": self.row.source,
            "row": self.row.row,
            "prompt": list(self.turns),
            "expected": self.row.expected,
            "answer": self.text,
            "finish": self.finish,
            "scores": {name: self.value(name) for name in self.scores},
        } | ({"why": why} if why else {})


@dataclass(frozen=True)
class Questions:
    """Rows with their scorers.

    Attributes:
        scorers: scorers by name; those of the command line first.
        chosen: names of the command line's scorers, for rows that name none.
        between: names of the judges that compare two models' answers instead of scoring single ones.
    """

    rows: AnswerRows
    scorers: Mapping[str, Scorer]
    chosen: tuple[str, ...]
    between: frozenset[str] = frozenset()

    def names_for(self, row: AnswerRow) -> tuple[str, ...]:
        """Returns the scorers of a row, except those that need an expected answer which it lacks."""
        names = [name for name in row.scorers or self.chosen if name not in self.between]
        return tuple(name for name in names if row.expected is not None or not self.scorers[name].needs_expected)

    def judges_for(self, row: AnswerRow) -> dict[str, Judge]:
        """Returns the judges that compare two answers to a row."""
        found = {name: self.scorers[name].judge for name in row.scorers or self.chosen if name in self.between}
        return {name: judge for name, judge in found.items() if judge is not None}

    def of_two_models(self) -> Questions:
        """Returns the same questions, with judges that compare the answers of two models."""
        return replace(self, between=frozenset(name for name, scorer in self.scorers.items() if scorer.judge))

    @property
    def without_expected(self) -> int:
        """Number of rows without an expected answer."""
        return sum(row.expected is None for row in self.rows.rows)

    def as_json(self) -> dict[str, Any]:
        """Returns the description of the data for stored evaluations."""
        return {
            "path": self.rows.path,
            "fingerprint": self.rows.fingerprint,
            "rows": len(self.rows.rows),
            "without_expected": self.without_expected,
        }


def open_questions(rows: AnswerRows, chosen: Sequence[str], base: Path) -> Questions:
    """Combines rows and their scorers. Each scorer is tried on an empty answer, so that errors appear before
    generation.

    Raises:
        UserError: a scorer does not exist, or an expected answer is not what it needs.
    """
    questions = Questions(rows, scorers_of(rows.rows, chosen, base), tuple(chosen))
    for row in rows.rows:
        for name in questions.names_for(row):
            if name.partition(":")[0] not in UNTRIED:
                questions.scorers[name].score("", row)
    return questions


def answer(
    model: OpenModel,
    questions: Questions,
    settings: AskSettings,
    conversations: Sequence[tuple[dict[str, Any], ...]] | None = None,
    finished: Callable[[int, str], None] = lambda number, text: None,
) -> list[ScoredAnswer]:
    """Generates and scores a model's answers to all rows. Judges are asked while other answers are generated.

    Args:
        conversations: prompt of each row, if it is not the row's own.
        finished: called with the index of the row and the text of each answer when it ends.

    Raises:
        UserError: a row has no usable prompt; nothing was generated.
    """
    rows = questions.rows.rows
    turns = conversations or [row.turns for row in rows]
    judged: list[dict[str, Future[Score]]] = [{} for _ in rows]

    with ConcurrentCalls[Score]() as calls:

        def ask_judges(number: int, text: str) -> None:
            row = rows[number]
            for name in questions.names_for(row):
                if questions.scorers[name].judge is not None:
                    judged[number][name] = calls.submit(partial(questions.scorers[name].score, text, row))
            finished(number, text)

        answers = ask(model, prompts_of(model, rows, turns), settings, ask_judges)
        scores = [
            {
                name: verdicts[name].result()
                if name in verdicts
                else questions.scorers[name].score(generation.text, row)
                for name in questions.names_for(row)
            }
            for row, generation, verdicts in zip(rows, answers, judged, strict=True)
        ]
    return [
        ScoredAnswer(row, tuple(asked), generation.text, generation.finish, each)
        for row, asked, generation, each in zip(rows, turns, answers, scores, strict=True)
    ]


def mean_scores(answers: Sequence[ScoredAnswer], names: Sequence[str]) -> dict[str, Mean]:
    """Returns the mean of each scorer over its scored rows; scorers without any are left out."""
    found = {name: mean_of([v for a in answers if (v := a.value(name)) is not None]) for name in names}
    return {name: mean for name, mean in found.items() if mean is not None}


def mean_figures(answers: Sequence[ScoredAnswer], names: Sequence[str], of: str = "") -> list[Figure]:
    """Returns the means as stored figures."""
    return [
        Figure(of, name, mean.value, mean.standard_error, mean.count, *mean_interval(mean))
        for name, mean in mean_scores(answers, names).items()
    ]


def details(answers: Sequence[ScoredAnswer], questions: Questions) -> dict[str, Any]:
    """Returns counts beside the figures."""
    judged = [
        score.why
        for a in answers
        for name, score in a.scores.items()
        if name.startswith("judge:") and name in questions.scorers
    ]
    counts = {verdict: judged.count(verdict) for verdict in VERDICTS}
    return {
        "rows": len(answers),
        "rows_without_expected": questions.without_expected,
        "rows_without_score": sum(all(a.value(name) is None for name in a.scores) for a in answers),
        "answers_cut": sum(a.finish == "length" for a in answers),
    } | ({"judge": counts} if judged else {})
