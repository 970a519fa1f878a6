"""Streaming of a request's answers from the engine's thread to the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from stoker.generate.answer_text import AnswerText
from stoker.generate.request import Generation, Request, Token
from stoker.serve.api_error import ApiError, bad_request, failed
from stoker.serve.engine_thread import EngineThread
from stoker.serve.openai.grammar import SchemaConstraint
from stoker.serve.served_models.served import Served

PlacedToken = tuple[int, Token]
"""A token with the number of characters before it in the text."""


@dataclass(frozen=True)
class Delta:
    """Increment of an answer.

    Attributes:
        index: index of the answer.
        tokens: tokens of the text, each with the number of characters of the answer before it; without a stop token
            and tokens cut off by a stop string.
        finish: ``stop`` or ``length`` in the last increment, else None.
        generation: the generation with its counts; the engine may still add to it before it finishes.
    """

    index: int
    text: str
    tokens: tuple[PlacedToken, ...]
    finish: str | None
    generation: Generation
    failed: BaseException | None = None


class _Answer:
    """Listener of a generation, called in the engine's thread."""

    def __init__(self, index: int, request: Request, text: AnswerText, sink: asyncio.Queue[Delta]) -> None:
        self.index, self.request, self.text = index, request, text
        self.cancelled = False
        self.generation: Generation | None = None
        self._sink, self._loop = sink, asyncio.get_running_loop()
        self._seen = 0
        self._held: list[PlacedToken] = []
        self._over = False

    def cancel(self) -> None:
        self.cancelled = True
        if self.generation is not None:
            self.generation.cancel()

    def hear(self, generation: Generation) -> None:
        """Handles the generation after every token, and at the end."""
        self.generation = generation
        if self._over:
            return
        if self.cancelled:
            generation.cancel()
            self._over = True
            return
        piece, ending, constraint = self._pushed(generation), generation.ended, self.request.constraint
        assert constraint is None or isinstance(constraint, SchemaConstraint)
        if ending is None and constraint is not None and constraint.failed:
            message = f"the JSON schema cannot be followed: {constraint.failed}"
            self._end(generation, piece, None, bad_request(message))
        elif self.text.stopped or (constraint is not None and constraint.done):
            rest = "" if self.text.stopped else self.text.finish()
            self._end(generation, piece + rest, "stop")
        elif ending in ("stop", "length"):
            piece += self.text.finish()
            self._end(generation, piece, "stop" if self.text.stopped else ending)
        elif ending is not None:
            self._end(generation, piece, None, generation.error or RuntimeError(ending))
        elif piece:
            self._give(generation, piece, None)

    def _pushed(self, generation: Generation) -> str:
        """Adds the new tokens, up to a stop; returns the text that they give."""
        piece = ""
        new = generation.tokens[self._seen :]
        self._seen += len(new)
        for token in new:
            if generation.ended == "stop" and token is generation.tokens[-1]:
                break
            self._held.append((self.text.decoded, token))
            piece += self.text.push(token.id)
            if self.text.stopped:
                break
        return piece

    def _end(self, generation: Generation, piece: str, finish: str | None, error: BaseException | None = None) -> None:
        self._over = True
        generation.cancel()
        self._give(generation, piece, finish, error)

    def _give(self, generation: Generation, piece: str, finish: str | None, error: BaseException | None = None) -> None:
        """Passes on a text with the tokens that begin in it; after the last text without a stop, with all tokens."""
        everything = self._over and not self.text.stopped
        given = [placed for placed in self._held if everything or placed[0] < len(self.text.text)]
        self._held = self._held[len(given) :]
        delta = Delta(self.index, piece, tuple(given), finish, generation, error)
        with suppress(RuntimeError):  # the event loop has closed
            self._loop.call_soon_threadsafe(self._sink.put_nowait, delta)


class AnswerStream:
    """Runs several engine requests of one HTTP request. Closing it cancels unfinished ones."""

    def __init__(
        self,
        worker: EngineThread,
        served: Served,
        requests: Sequence[Request],
        stop: Sequence[str] = (),
        *,
        skip_special_tokens: bool = True,
    ) -> None:
        self._worker, self._served = worker, served
        self._sink: asyncio.Queue[Delta] = asyncio.Queue()
        tokenizer = served.opened.tokenizer
        texts = [AnswerText(tokenizer, stop, skip_special_tokens=skip_special_tokens) for _ in requests]
        self._answers = [
            _Answer(index, request, text, self._sink)
            for index, (request, text) in enumerate(zip(requests, texts, strict=True))
        ]

    async def begin(self) -> None:
        """Submits the requests; cancels all if the engine rejects one.

        Raises:
            UserError: the engine rejects one.
        """
        try:
            await asyncio.wrap_future(self._worker.call(self._submit))
        except BaseException:
            self.close()
            raise

    def _submit(self) -> None:
        for answer in self._answers:
            if not answer.cancelled:
                answer.generation = self._served.host.engine.submit(answer.request, answer.hear)

    async def __aiter__(self) -> AsyncIterator[Delta]:
        """Yields the answers' increments until all have finished.

        Raises:
            ApiError: a pass through the model failed, or the answer's schema allows no next token.
        """
        left = len(self._answers)
        while left:
            delta = await self._sink.get()
            if delta.failed is not None:
                raise delta.failed if isinstance(delta.failed, ApiError) else failed(delta.failed)
            left -= delta.finish is not None
            yield delta

    def cancel(self, index: int) -> None:
        """Cancels one answer, which then yields nothing more."""
        self._answers[index].cancel()

    def close(self) -> None:
        """Cancels unfinished answers."""
        for answer in self._answers:
            answer.cancel()
