"""Answers to the user's rows, scored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stoker.evaluate.ask_model import AskSettings, ask, prompts_of
from stoker.evaluate.intervals import Mean, mean_of
from stoker.generate.open_model import OpenModel
from stoker.runs.evaluations import Figure
from stoker.scoring.answer_rows import AnswerRow, AnswerRows
from stoker.scoring.judge import Judge
from stoker.scoring.scorer import Score, Scorer
from stoker.scoring.scorers import UNTRIED, scorers_of


@dataclass(frozen=True)
class ScoredAnswer:
    """An answer beside its scores.

    Attributes:
        finish: ``stop`` or ``length``.
        scores: by the name of the scorer; those that need an expected answer are missing where the row has none.
    """

    row: AnswerRow
    turns: tuple[dict[str, Any], ...]
    text: str
    finish: str
    scores: Mapping[str, Score]

    def as_json(self) -> dict[str, Any]:
        """The row that is written to the results."""
        why = {name: score.why for name, score in self.scores.items() if score.why}
        return {
            "source": self.row.source,
            "row": self.row.row,
            "prompt": list(self.turns),
            "expected": self.row.expected,
            "answer": self.text,
            "finish": self.finish,
            "scores": {name: score.value for name, score in self.scores.items()},
        } | ({"why": why} if why else {})


@dataclass(frozen=True)
class Questions:
    """Rows with the scorers that each of them needs.

    Attributes:
        scorers: by name; those of the command line first.
        chosen: names of those of the command line, for rows that name none.
        between: names of the judges that compare two models' answers, and score none by itself.
    """

    rows: AnswerRows
    scorers: Mapping[str, Scorer]
    chosen: tuple[str, ...]
    between: frozenset[str] = frozenset()

    def names_for(self, row: AnswerRow) -> tuple[str, ...]:
        """The scorers of a row, those left out that need an expected answer which it lacks."""
        names = [name for name in row.scorers or self.chosen if name not in self.between]
        return tuple(name for name in names if row.expected is not None or not self.scorers[name].needs_expected)

    def judges_for(self, row: AnswerRow) -> dict[str, Judge]:
        """The judges that compare two answers to a row."""
        found = {name: self.scorers[name].judge for name in row.scorers or self.chosen if name in self.between}
        return {name: judge for name, judge in found.items() if judge is not None}

    def of_two_models(self) -> Questions:
        """The same questions, with judges that compare the answers of two models."""
        return replace(self, between=frozenset(name for name, scorer in self.scorers.items() if scorer.judge))

    @property
    def without_expected(self) -> int:
        """Rows that have no expected answer."""
        return sum(row.expected is None for row in self.rows.rows)

    def as_json(self) -> dict[str, Any]:
        """The data, as evaluations keep it."""
        return {
            "path": self.rows.path,
            "fingerprint": self.rows.fingerprint,
            "rows": len(self.rows.rows),
            "without_expected": self.without_expected,
        }


def open_questions(rows: AnswerRows, chosen: Sequence[str], base: Path) -> Questions:
    """Rows and their scorers, each tried on an empty answer, so that what is wrong is said before anything is asked.

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
) -> list[ScoredAnswer]:
    """Asks a model all rows, and scores what it answers.

    Args:
        conversations: what is asked for each row, where it is not the row's own prompt.

    Raises:
        UserError: a row cannot be asked; nothing was.
    """
    rows = questions.rows.rows
    turns = conversations or [row.turns for row in rows]
    answers = ask(model, prompts_of(model, rows, turns), settings)
    return [
        ScoredAnswer(
            row,
            tuple(asked),
            said.text,
            said.finish,
            {name: questions.scorers[name].score(said.text, row) for name in questions.names_for(row)},
        )
        for row, asked, said in zip(rows, turns, answers, strict=True)
    ]


def means(answers: Sequence[ScoredAnswer], names: Sequence[str]) -> dict[str, Mean]:
    """The mean of each scorer over the rows that it scored; without those that scored none."""
    found = {name: mean_of([a.scores[name].value for a in answers if name in a.scores]) for name in names}
    return {name: mean for name, mean in found.items() if mean is not None}


def figures(answers: Sequence[ScoredAnswer], names: Sequence[str], of: str = "") -> list[Figure]:
    """The means as they are kept."""
    return [
        Figure(of, name, mean.value, mean.standard_error, mean.count) for name, mean in means(answers, names).items()
    ]


def details(answers: Sequence[ScoredAnswer], questions: Questions) -> dict[str, Any]:
    """Counts beside the figures."""
    judged = [
        score.why
        for a in answers
        for name, score in a.scores.items()
        if name.startswith("judge:") and name in questions.scorers
    ]
    counts = {verdict: judged.count(verdict) for verdict in ("win", "loss", "tie", "unclear")}
    return {
        "rows": len(answers),
        "rows_without_expected": questions.without_expected,
        "rows_without_score": sum(not a.scores for a in answers),
        "answers_cut": sum(a.finish == "length" for a in answers),
    } | ({"judge": counts} if judged else {})
