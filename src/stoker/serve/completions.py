"""``/v1/completions``."""

from __future__ import annotations

import codecs
import math
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

from stoker.generate.request import Token
from stoker.serve.answer_stream import AnswerStream
from stoker.serve.bodies import CompletionBody
from stoker.serve.chat import clamp_log_probability
from stoker.serve.endpoint_state import Service, Usage, engine_requests, submit_requests
from stoker.serve.served import Served
from stoker.serve.sse import DONE, event


@dataclass
class _Choice:
    """State of an answer, with its prompt where it is echoed."""

    prompt: tuple[int, ...]
    prompt_text: str
    opened: bool = False
    text: str = ""
    tokens: list[Token] = field(default_factory=list)
    finish: str | None = None
    offset: int = 0  # characters of text before the next token


class CompletionAnswer:
    """Response to one completion request."""

    def __init__(self, service: Service, served: Served, body: CompletionBody) -> None:
        self.service, self.served, self.body = service, served, body
        self.usage = Usage(service, served)
        self._id, self._created = f"cmpl-{secrets.token_hex(12)}", int(time.time())
        self._choices: list[_Choice] = []

    def _prompts(self) -> list[tuple[list[int], str]]:
        """Returns ids and text of each prompt."""
        tokenizer = self.served.opened.tokenizer
        found = []
        for number, prompt in enumerate(self.body.prompt):
            if isinstance(prompt, str):
                found.append((self.served.opened.text_ids(prompt), prompt))
                continue
            self.served.check_ids(prompt, param=f"prompt[{number}]")
            found.append((prompt, tokenizer.decode(prompt, skip_special_tokens=False)))
        return found

    async def _answers(self) -> AnswerStream:
        body = self.body
        prompts = await self.service.in_texts_thread(self._prompts)
        requests = []
        for ids, text in prompts:
            requests += engine_requests(
                body,
                self.served,
                ids,
                max_tokens=body.max_tokens,
                alternatives=body.logprobs or 0,
                score_prompt=body.echo and body.logprobs is not None,
            )
            self._choices += [_Choice(tuple(ids), text) for _ in range(body.n)]
        answers = await submit_requests(AnswerStream(self.service.worker, self.served, requests, body.stop))
        for ids, _ in prompts:
            self.usage.prompt_of(len(ids))
        return answers

    async def _deltas(self) -> AsyncIterator[tuple[int, str, list[Token], str | None]]:
        """Yields the choices' increments: (choice, text, tokens, finish reason). An echoed prompt comes first."""
        body = self.body
        answers = await self._answers()
        try:
            async for delta in answers:
                self.usage.token_came()
                choice = self._choices[delta.index]
                text, tokens, finish = delta.text, list[Token](delta.tokens), delta.finish
                if body.echo and not choice.opened:
                    first = [Token(choice.prompt[0], float("nan"))]
                    scored = delta.generation.scored if body.logprobs is not None else []
                    text, tokens = choice.prompt_text + text, [*first, *scored, *tokens]
                choice.opened = True
                if finish is not None:
                    self.usage.answer_of(len(delta.generation.tokens), delta.generation.shared)
                yield delta.index, text, tokens, finish
        finally:
            answers.close()

    async def whole(self) -> dict[str, Any]:
        """Returns the whole response."""
        async for index, text, tokens, finish in self._deltas():
            choice = self._choices[index]
            choice.text += text
            choice.tokens += tokens
            choice.finish = finish
        found = [
            self._part(index, choice.text, choice.tokens, choice.finish) for index, choice in enumerate(self._choices)
        ]
        return self._head() | {"choices": found, "usage": self.usage.as_json()}

    async def events(self) -> AsyncIterator[bytes]:
        """Yields the response as events."""
        options = self.body.stream_options
        with_usage = options is not None and options.include_usage
        head = self._head() | ({"usage": None} if with_usage else {})
        async for index, text, tokens, finish in self._deltas():
            if text or tokens or finish is not None:
                yield event(head | {"choices": [self._part(index, text, tokens, finish)]})
        if with_usage:
            yield event(head | {"choices": [], "usage": self.usage.as_json()})
        yield DONE

    def _head(self) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": "text_completion",
            "created": self._created,
            "model": self.served.name,
            "system_fingerprint": f"stoker-{version('stoker')}",
        }

    def _part(self, index: int, text: str, tokens: Sequence[Token], finish: str | None) -> dict[str, Any]:
        scores = None if self.body.logprobs is None else self._scores(self._choices[index], tokens)
        return {"index": index, "text": text, "logprobs": scores, "finish_reason": finish}

    def _scores(self, choice: _Choice, tokens: Sequence[Token]) -> dict[str, Any]:
        """Returns the log-probabilities of tokens; a prompt's first token has none."""
        texts, names = self.served.texts, [self.served.texts.text(token.id) for token in tokens]
        values = [None if math.isnan(token.log_probability) else token for token in tokens]
        decoder, offsets = codecs.getincrementaldecoder("utf-8")("replace"), []
        for token in tokens:
            offsets.append(choice.offset)
            choice.offset += len(decoder.decode(texts.bytes(token.id)))
        alternatives = [
            token and {texts.text(number): clamp_log_probability(value) for number, value in token.alternatives}
            for token in values
        ]
        return {
            "tokens": names,
            "token_logprobs": [token and clamp_log_probability(token.log_probability) for token in values],
            "top_logprobs": alternatives if self.body.logprobs else None,
            "text_offset": offsets,
        }
