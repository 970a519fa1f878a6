"""Comparison of two models on the same rows: differences with paired intervals, and the rows that differ most."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from stoker.errors import placed_errors
from stoker.evaluate.ask_model import AskSettings
from stoker.evaluate.intervals import PairedDifference, paired_difference
from stoker.evaluate.scored_answers import Questions, ScoredAnswer, answer
from stoker.generate.open_model import OpenModel
from stoker.runs.evaluations import Figure
from stoker.scoring.concurrent_calls import ConcurrentCalls
from stoker.scoring.judge import Judge, Judgement
from stoker.scoring.scorer import Score
from stoker.scoring.scorers import question_of

MOST_DIFFERENT = 5  # rows that are shown


@dataclass(frozen=True)
class Compared:
    """Comparison of two models by one measure.

    Attributes:
        name: the scorer, or ``loss``.
        difference: the first minus the second.
        rows: indices of the rows with the largest differences, in descending order.
    """

    name: str
    difference: PairedDifference
    rows: tuple[int, ...]

    def as_json(self) -> dict[str, Any]:
        """Returns wins, losses and ties of the first model."""
        found = self.difference
        return {"wins": found.wins, "losses": found.losses, "ties": found.ties, "most_different": list(self.rows)}


def figure_of(difference: PairedDifference, of: str, name: str) -> Figure:
    """Returns a difference as a stored figure."""
    return Figure(
        of=of, name=name, value=difference.value, rows=difference.rows, low=difference.low, high=difference.high
    )


def answer_against(
    first: Sequence[ScoredAnswer],
    model: OpenModel,
    questions: Questions,
    settings: AskSettings,
    finished: Callable[[int, str], None],
) -> tuple[list[ScoredAnswer], list[ScoredAnswer]]:
    """Generates and scores a second model's answers to the same rows; judges compare them with the first's meanwhile.

    Args:
        finished: called with the index of the row and the text of each answer when it ends.

    Returns:
        Both models' answers, with the judges' verdicts: 1 and 0 for a win, 0.5 for a tie, none if it is unclear.
    """
    judged: list[dict[str, Future[Judgement]]] = [{} for _ in first]
    with ConcurrentCalls[Judgement]() as calls:

        def ask_judges(number: int, text: str) -> None:
            for name, judge in questions.judges_for(first[number].row).items():
                judged[number][name] = calls.submit(partial(_compared, judge, first[number], text))
            finished(number, text)

        second = answer(model, questions, settings, finished=ask_judges)
        verdicts = [{name: verdict.result() for name, verdict in each.items()} for each in judged]
    return (
        [
            replace(a, scores={**a.scores, **{name: Score(v.score, v.name, v.is_clear) for name, v in each.items()}})
            for a, each in zip(first, verdicts, strict=True)
        ],
        [
            replace(
                b, scores={**b.scores, **{name: Score(1 - v.score, v.turned, v.is_clear) for name, v in each.items()}}
            )
            for b, each in zip(second, verdicts, strict=True)
        ],
    )


def _compared(judge: Judge, first: ScoredAnswer, second: str) -> Judgement:
    if first.text == second:
        return Judgement("tie")
    with placed_errors(first.row.placed):
        return judge.compare(question_of(first.row), first.text, second)


def compare_answers(
    first: Sequence[ScoredAnswer], second: Sequence[ScoredAnswer], names: Sequence[str], *, seed: int
) -> list[Compared]:
    """Compares two models' scores on the same rows; a scorer without scored rows is left out."""
    found = []
    for name in names:
        rows = [number for number, scored in enumerate(first) if scored.value(name) is not None]
        if not rows:
            continue
        a, b = ([answers[row].scores[name].value for row in rows] for answers in (first, second))
        difference = paired_difference(a, b, seed=seed)
        found.append(Compared(name, difference, _most_different(a, b, rows)))
    return found


def _most_different(a: Sequence[float], b: Sequence[float], rows: Sequence[int]) -> tuple[int, ...]:
    order = sorted(range(len(rows)), key=lambda i: -abs(a[i] - b[i]))
    return tuple(rows[i] for i in order[:MOST_DIFFERENT] if a[i] != b[i])


def compare_losses(first: Sequence[float], second: Sequence[float], units: Sequence[float], *, seed: int) -> Compared:
    """Compares two models' losses on the same rows; a win is a row on which the first has the lower loss.

    Args:
        first, second: summed loss of each row.
        units: number of targets, or bytes, that each row's loss is summed over.
    """
    found = paired_difference(first, second, seed=seed, units=units)
    a, b = ([value / size for value, size in zip(values, units, strict=True)] for values in (first, second))
    lower_wins = replace(found, wins=found.losses, losses=found.wins)
    return Compared("loss", lower_wins, _most_different(a, b, range(len(a))))
