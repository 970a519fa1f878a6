"""Batched generation of answers to the prompts of rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from stoker.errors import UserError, placed_errors
from stoker.generate.answer_text import FinishedAnswer, answer_all
from stoker.generate.generation_engine import prompt_too_long
from stoker.generate.open_model import OpenModel
from stoker.generate.request import Request, Sampling
from stoker.scoring.answer_rows import AnswerRow


@dataclass(frozen=True)
class AskSettings:
    """Sampling settings of the answers.

    Attributes:
        seed: the answer to row i is sampled with ``seed + i``.
    """

    temperature: float = 0.0
    seed: int = 0
    max_tokens: int = 256

    def as_json(self) -> dict[str, Any]:
        return {"temperature": self.temperature, "seed": self.seed, "max_tokens": self.max_tokens}


def prompts_of(
    model: OpenModel, rows: Sequence[AnswerRow], conversations: Sequence[Sequence[dict[str, Any]]]
) -> list[list[int]]:
    """Returns the token ids of each row's conversation.

    Raises:
        UserError: a conversation is empty, too long, or rejected by the chat template; the error has the row's place.
    """
    return [_ids(model, row, turns) for row, turns in zip(rows, conversations, strict=True)]


def _ids(model: OpenModel, row: AnswerRow, turns: Sequence[dict[str, Any]]) -> list[int]:
    if not turns:
        raise UserError(row.problem("the row has no prompt", "name its column prompt, messages or question"))
    if model.chats:
        with placed_errors(row.placed):
            ids = model.prompt_ids(turns)
    elif len(turns) > 1:
        message = f"the row has {len(turns)} turns, and {model.name} continues plain text"
        raise UserError(row.problem(message, "give it one prompt a row"))
    else:
        ids = model.text_ids(turns[0]["content"])
    context = model.decoder.context
    if context is not None and len(ids) >= context:
        problem = prompt_too_long(len(ids), context)
        raise UserError(row.problem(problem.message, problem.suggestion))
    return ids


def ask(
    model: OpenModel,
    prompts: Sequence[Sequence[int]],
    settings: AskSettings,
    finished: Callable[[int, str], None],
) -> list[FinishedAnswer]:
    """Returns the answers to prompts.

    Args:
        finished: called with the number and the text of each answer when it ends.
    """
    requests = [
        Request(
            tuple(ids),
            settings.max_tokens,
            Sampling(temperature=settings.temperature, seed=settings.seed + number),
            model.codec.stop_ids,
        )
        for number, ids in enumerate(prompts)
    ]
    return answer_all(model.engine(), model.tokenizer, requests, finished=finished)
