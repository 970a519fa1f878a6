"""Incremental decoding of an answer's tokens, up to a stop string."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from stoker.generate.generation_engine import GenerationEngine
from stoker.generate.request import Generation, Request, answer_ids

REPLACEMENT = "\ufffd"  # decoded for bytes that are no whole character


class AnswerText:
    """Decodes tokens incrementally, and holds back a possible start of a stop string.

    Attributes:
        text: text returned so far.
        stopped: whether a stop string was found; the text excludes it and everything after it.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = (), *, skip_special_tokens: bool = True) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._stream = DecodeStream(skip_special_tokens=skip_special_tokens)
        self._stop = [s for s in stop if s]
        self._ids: list[int] = []
        self._decoded = 0  # characters
        self._incomplete: list[int] = []  # last tokens, which end inside a character
        self._held = ""
        self.text, self.stopped = "", False

    @property
    def tokens(self) -> int:
        """Number of pushed tokens."""
        return len(self._ids)

    @property
    def decoded(self) -> int:
        """Number of whole characters of the pushed tokens, including held back ones."""
        if not self._incomplete:
            return self._decoded
        rest = self._tokenizer.decode(self._incomplete, skip_special_tokens=self._skip)
        return self._decoded + len(rest.rstrip(REPLACEMENT))

    def push(self, token: int) -> str:
        """Returns the text that a token adds; empty if a character is incomplete or a stop string may have begun."""
        self._ids.append(token)
        try:
            piece = self._stream.step(self._tokenizer, token) or ""
        except Exception:  # tokenizers has no narrower one: an invalid byte changed the text of the bytes before it
            piece = self._whole()[self._decoded :]
            self._stream = DecodeStream(skip_special_tokens=self._skip)
            self._stream.step(self._tokenizer, token)
        self._incomplete = [] if piece else [*self._incomplete, token]
        self._decoded += len(piece)
        return self._give(piece)

    def finish(self) -> str:
        """Returns the remaining text after the last token; an incomplete character becomes a replacement character."""
        given = self._give(self._whole()[self._decoded :])
        if self.stopped:
            return given
        held, self._held = self._held, ""
        self.text += held
        return given + held

    def _whole(self) -> str:
        return self._tokenizer.decode(self._ids, skip_special_tokens=self._skip)

    def _give(self, piece: str) -> str:
        if self.stopped or not piece:
            return ""
        text = self._held + piece
        found = [place for place in (text.find(stop) for stop in self._stop) if place >= 0]
        if found:
            self.stopped, given, self._held = True, text[: min(found)], ""
        else:
            cut = len(text) - max((overlap(text, stop) for stop in self._stop), default=0)
            given, self._held = text[:cut], text[cut:]
        self.text += given
        return given


def overlap(text: str, stop: str) -> int:
    """Returns the length of the longest suffix of a text that is a proper prefix of a stop string."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)


@dataclass(frozen=True)
class FinishedAnswer:
    """An answer as text.

    Attributes:
        finish: ``stop`` (a stop token or string) or ``length``.
    """

    text: str
    finish: str
    generation: Generation


def answer_all(
    engine: GenerationEngine,
    tokenizer: Tokenizer,
    requests: Sequence[Request],
    stop: Sequence[str] = (),
    finished: Callable[[int, str], None] = lambda number, text: None,
) -> list[FinishedAnswer]:
    """Answers requests in one batch.

    Args:
        finished: called with the number and the text of each answer when it ends; an error that it raises ends all.
    """
    texts = [AnswerText(tokenizer, stop) for _ in requests]
    listeners = [partial(_listen, text, partial(finished, number)) for number, text in enumerate(texts)]
    generations = engine.run(requests, listeners)
    return [
        FinishedAnswer(text.text, "stop" if text.stopped else str(generation.ended), generation)
        for text, generation in zip(texts, generations, strict=True)
    ]


def _listen(text: AnswerText, finished: Callable[[str], None], generation: Generation) -> None:
    """Adds the new tokens of an answer to its text; passes on the whole one."""
    for token in answer_ids(generation)[text.tokens :]:
        text.push(token)
    if text.stopped:
        generation.cancel()
    elif generation.ended is not None:
        text.finish()
    if generation.ended not in (None, "failed"):
        finished(text.text)


def stream_answer(
    engine: GenerationEngine, tokenizer: Tokenizer, request: Request, stop: Sequence[str] = ()
) -> Generator[str]:
    """Yields the text of one answer in pieces; closing the iterator cancels it."""
    text = AnswerText(tokenizer, stop)
    for token in engine.stream(request):
        if token.id not in request.stop_ids and (piece := text.push(token.id)):
            yield piece
        if text.stopped:
            return
    if rest := text.finish():
        yield rest
