"""The increments of an answer, with a scripted engine in place of a model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from stoker.generate.request import Ending, Generation, Listener, Request, Token
from stoker.serve.openai.answer_stream import AnswerStream, Delta
from tiny_tokenizer import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
STOP = TOKENIZER.token_to_id("<|im_end|>")


def deltas_of(tokens: Sequence[int], *, stop: Sequence[str] = (), ended: Ending = "length") -> list[Delta]:
    """The increments of an answer of these tokens, which a stop string may end before."""

    def submit(request: Request, listener: Listener) -> Generation:
        generation = Generation(request, listener)
        for number, token in enumerate(tokens, 1):
            generation.tokens.append(Token(token, -float(number)))
            if generation.cancelled:
                generation.ended = "cancelled"
            elif number == len(tokens):
                generation.ended = ended
            generation.notify()
            if generation.ended:
                break
        return generation

    def call(function: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(function())
        return future

    served: Any = SimpleNamespace(
        opened=SimpleNamespace(tokenizer=TOKENIZER), host=SimpleNamespace(engine=SimpleNamespace(submit=submit))
    )
    worker: Any = SimpleNamespace(call=call)

    async def stream() -> list[Delta]:
        request = Request((1,), len(tokens), stop_ids=frozenset({STOP}))
        answers = AnswerStream(worker, served, [request], stop)
        await answers.begin()
        return [delta async for delta in answers]

    return asyncio.run(stream())


def letters(text: str) -> list[int]:
    """A token for each character."""
    ids = [TOKENIZER.token_to_id(letter) for letter in text]
    assert None not in ids
    return ids


def given(deltas: Sequence[Delta]) -> tuple[str, str]:
    """The text of all increments, and that of their tokens one by one."""
    text = "".join(delta.text for delta in deltas)
    placed = [each for delta in deltas for each in delta.tokens]
    assert [start for start, _ in placed] == list(range(len(placed)))
    return text, "".join(TOKENIZER.decode([token.id]) for _, token in placed)


@pytest.mark.parametrize(
    ("said", "text"),
    [("xxyz", "x"), ("abxyz", "ab"), ("xyxyxyz", "xyxy"), ("xyzab", ""), ("abxy", "abxy"), ("xyab", "xyab")],
)
def test_the_tokens_are_those_of_the_text_before_a_stop_string(said: str, text: str) -> None:
    """Also where a token that may begin the stop string follows others that then cannot."""
    deltas = deltas_of(letters(said), stop=["xyz"])
    assert given(deltas) == (text, text)
    assert deltas[-1].finish == ("length" if text == said else "stop")
    assert deltas[-1].generation.cancelled  # the engine writes no more of it


def test_a_stop_token_is_no_token_of_the_text() -> None:
    deltas = deltas_of([*letters("ab"), STOP], ended="stop")
    assert given(deltas) == ("ab", "ab") and deltas[-1].finish == "stop"
    assert len(deltas[-1].generation.tokens) == 3


def test_tokens_come_with_the_text_that_they_begin() -> None:
    """A token that begins what may be a stop string is held back with its text."""
    deltas = deltas_of(letters("xxab"), stop=["xyz"])
    assert [(delta.text, len(delta.tokens)) for delta in deltas] == [("x", 1), ("xa", 2), ("b", 1)]
