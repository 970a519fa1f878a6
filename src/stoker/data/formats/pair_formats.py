"""Row formats that compare answers to one prompt; their columns are in `stoker.data.formats.all_formats`."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from itertools import islice, permutations
from math import comb
from typing import Any

from stoker.data.files.rows import Message, Preference, Ranking
from stoker.data.formats.conversation_formats import question_with_input
from stoker.data.formats.format_spec import Format
from stoker.data.formats.human_assistant_text import human_assistant_turns
from stoker.data.formats.messages import Refused, parsed, until_last_answer
from stoker.data.formats.named_columns import NamedColumns
from stoker.data.formats.shared_prompt import conversation_of, split_prompt

MOST_PAIRS = 1000  # pairs of one row, all in memory at once: 45 answers have 990


def _preference(row: NamedColumns) -> Preference:
    chosen, rejected = (until_last_answer(row.turns(side, "assistant")) for side in ("chosen", "rejected"))
    return _pair(row, _prompt_of(row, bare=chosen[0].role == "assistant"), chosen, rejected)


def _hh_rlhf(row: NamedColumns) -> Preference:
    chosen, rejected = (human_assistant_turns(row.need(side), row.name(side)) for side in ("chosen", "rejected"))
    return _pair(row, (), chosen, rejected)


def _pair(
    row: NamedColumns, prompt: Sequence[Message], chosen: Sequence[Message], rejected: Sequence[Message]
) -> Preference:
    names = [row.name("chosen"), row.name("rejected")]
    whole = [conversation_of(prompt, side, name) for side, name in zip((chosen, rejected), names, strict=True)]
    shared, (better, worse) = split_prompt(prompt, whole, " and ".join(names))
    if better == worse:
        raise Refused("chosen equals rejected")
    if not shared:
        raise Refused("no prompt: chosen and rejected share no first turns")
    return Preference(_with_system(row, shared), better, worse, row.tools(), _margin(row))


def _with_system(row: NamedColumns, prompt: tuple[Message, ...]) -> tuple[Message, ...]:
    return prompt if prompt[0].role == "system" else (*row.system(), *prompt)


def _ranked(row: NamedColumns) -> Ranking:
    given = parsed(row.need("answers"))
    if not isinstance(given, list) or len(given) < 2:
        raise Refused(f"{row.name('answers')} is not a list of two answers or more")
    asked, name = row.turns("prompt", "user"), row.name("answers")
    said = (until_last_answer(row.turns_in(answer, "answers", "assistant")) for answer in given)
    prompt, answers = split_prompt(asked, [conversation_of(asked, answer, name) for answer in said], name)
    worth = _worth(row, len(answers))
    scored = row.get("scores") is not None
    sampled = comb(len(answers), 2) > MOST_PAIRS
    both_ways = (pair for one, other in _some_pairs(len(answers)) for pair in ((one, other), (other, one)))
    compared = both_ways if sampled else permutations(range(len(answers)), 2)
    differing = (
        (better, worse, worth[better] - worth[worse] if scored else 0.0)
        for better, worse in compared
        if worth[better] > worth[worse] and answers[better] != answers[worse]
    )
    pairs = tuple(islice(differing, MOST_PAIRS))
    if not pairs:
        raise Refused("no two answers differ in rank")
    dropped = next(differing, None) is not None
    return Ranking(_with_system(row, prompt), answers, pairs, row.tools(), dropped)


def _some_pairs(answers: int) -> Iterator[tuple[int, int]]:
    """Yields every two answers once, in a random order (the same every time) that takes all answers equally often."""
    order = random.Random(answers).sample(range(answers), answers)
    for distance in range(1, answers):
        yield from zip(order, order[distance:], strict=False)


def _scored(row: NamedColumns) -> Ranking:
    """Parses the row that `stoker.data.formats.prompt_groups` joins the answers to a prompt to."""
    answers, scores = row.get("answers"), row.get("scores")
    if isinstance(answers, list) and len(answers) < 2:
        raise Refused("a prompt with one scored answer, without another to compare it with")
    if isinstance(scores, list) and scores and all(score == scores[0] for score in scores):
        raise Refused("all answers to the prompt have the same score")
    return _ranked(row)


def _worth(row: NamedColumns, answers: int) -> list[float]:
    """Returns the value of each answer: its score, or its negated rank; by default answers are in order, best first."""
    name = next((name for name in ("scores", "ranks") if row.get(name) is not None), None)
    if name is None:
        return [float(-number) for number in range(answers)]
    values = parsed(row.get(name))
    if not isinstance(values, list) or len(values) != answers:
        raise Refused(f"{row.name(name)} has not one number for each answer")
    numbers = [finite_number(value, row.name(name)) for value in values]
    return numbers if name == "scores" else [-number for number in numbers]


def _margin(row: NamedColumns) -> float:
    """Returns the margin of the chosen answer: the column ``margin``, or the difference of the two scores."""
    if row.get("margin") is not None:
        return _number(row, "margin")
    if row.get("chosen_score") is None or row.get("rejected_score") is None:
        return 0.0
    return _number(row, "chosen_score") - _number(row, "rejected_score")


def _number(row: NamedColumns, ours: str) -> float:
    return finite_number(row.get(ours), row.name(ours))


def finite_number(value: Any, name: str) -> float:
    """Returns the number in a column.

    Raises:
        Refused: it is no number, or not finite.
    """
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise Refused(f"{name} is not a number")
    return number


def _prompt_of(row: NamedColumns, *, bare: bool) -> Sequence[Message]:
    """Returns the turns of the prompt's column, or of the conversation beside the answers; empty without either.

    Args:
        bare: whether the answers are no whole conversations.
    """
    if row.get("prompt") is not None:
        if isinstance(row.get("prompt"), str) and row.text("input").strip():
            return question_with_input(row, "prompt")
        return row.turns("prompt", "user")
    return row.turns("conversations", "user") if bare and row.get("conversations") is not None else ()


PAIRS = {
    "preference": Format(
        _preference,
        ("chosen", "rejected"),
        {
            "chosen": ("chosen_messages",),
            "rejected": ("rejected_messages",),
            "prompt": ("instruction", "question", "query"),
            "chosen_score": ("score_chosen",),
            "rejected_score": ("score_rejected",),
            "conversations": ("messages", "conversation"),
        },
    ),
    "hh_rlhf": Format(_hh_rlhf, ("chosen", "rejected")),
    "ranked": Format(
        _ranked,
        ("prompt", "answers"),
        {
            "prompt": ("instruction", "question", "query"),
            "answers": ("responses", "completions", "candidates"),
            "scores": ("ratings", "rewards"),
            "ranks": ("rank", "ranking"),
        },
    ),
    "scored": Format(
        _scored,
        ("prompt", "answer", "score"),
        {
            "prompt": ("instruction", "question", "query"),
            "answer": ("response", "completion", "output"),
            "score": ("rating", "reward"),
        },
    ),
}
