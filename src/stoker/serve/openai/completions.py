"""``/v1/completions``."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenizers import Tokenizer

from stoker.generate.answer_text import AnswerText
from stoker.generate.request import Token
from stoker.serve.endpoint_state import Service, Usage, engine_requests, response_head
from stoker.serve.openai.answer_stream import AnswerStream, PlacedToken
from stoker.serve.openai.bodies import CompletionBody
from stoker.serve.openai.sse import DONE, event
from stoker.serve.openai.token_text import clamp_log_probability
from stoker.serve.served_models.served import Served


@dataclass
class _Choice:
    """State of an answer, with its prompt where it is echoed."""

    prompt: tuple[int, ...]
    prompt_text: str
    prompt_starts: Sequence[int] = ()
    opened: bool = False
    text: str = ""
    tokens: list[PlacedToken] = field(default_factory=list)
    finish: str | None = None


class CompletionAnswer:
    """Response to one completion request."""

    def __init__(self, service: Service, served: Served, body: CompletionBody) -> None:
        self.service, self.served, self.body = service, served, body
        self.usage = Usage(service, served)
        self._head = response_head("text_completion", served, "cmpl")
        self._choices: list[_Choice] = []

    async def unread(self) -> list[str]:
        """Returns no fields: a prompt is read as it is written."""
        return []

    @property
    def _scores_prompts(self) -> bool:
        return self.body.echo and self.body.logprobs is not None

    def _prompts(self) -> list[tuple[list[int], str, list[int]]]:
        """Returns ids and text of each prompt; where they are scored, also where each token begins in the text."""
        opened, scored = self.served.opened, self._scores_prompts
        found = []
        for number, prompt in enumerate(self.body.prompt):
            if isinstance(prompt, str):
                ids = opened.text_ids(prompt)
                self.served.check_length(len(ids), param=f"prompt[{number}]")
                places = opened.codec.encoder.beginning_places(prompt) if scored else []
                found.append((ids, prompt, places))
                continue
            self.served.check_length(len(prompt), param=f"prompt[{number}]")
            self.served.check_ids(prompt, param=f"prompt[{number}]")
            text = opened.tokenizer.decode(prompt, skip_special_tokens=False)
            found.append((prompt, text, _places(prompt, opened.tokenizer) if scored else []))
        return found

    async def _answers(self) -> AnswerStream:
        body = self.body
        prompts = await self.service.in_texts_thread(self._prompts)
        requests = []
        for ids, text, places in prompts:
            requests += engine_requests(
                body,
                self.served,
                ids,
                max_tokens=body.max_tokens,
                alternatives=body.logprobs or 0,
                score_prompt=self._scores_prompts,
            )
            self._choices += [_Choice(tuple(ids), text, places) for _ in range(body.n)]
        answers = AnswerStream(self.service.worker, self.served, requests, body.stop)
        await answers.begin()
        for ids, _, _ in prompts:
            self.usage.prompt_of(len(ids))
        return answers

    async def _deltas(self) -> AsyncIterator[tuple[int, str, list[PlacedToken], str | None]]:
        """Yields the choices' increments: (choice, text, tokens, finish reason). An echoed prompt comes first."""
        body = self.body
        answers = await self._answers()
        try:
            async for delta in answers:
                self.usage.token_came()
                choice = self._choices[delta.index]
                before = len(choice.prompt_text) if body.echo else 0
                text, finish = delta.text, delta.finish
                tokens = [(before + start, token) for start, token in delta.tokens]
                if body.echo and not choice.opened:
                    text = choice.prompt_text + text
                    if self._scores_prompts:
                        scored = [Token(choice.prompt[0], float("nan")), *delta.generation.scored]
                        tokens = [*zip(choice.prompt_starts, scored, strict=True), *tokens]
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
        return self._head | {"choices": found, "usage": self.usage.as_json()}

    async def events(self) -> AsyncIterator[bytes]:
        """Yields the response as events."""
        options = self.body.stream_options
        with_usage = options is not None and options.include_usage
        head = self._head | ({"usage": None} if with_usage else {})
        async for index, text, tokens, finish in self._deltas():
            if text or tokens or finish is not None:
                yield event(head | {"choices": [self._part(index, text, tokens, finish)]})
        if with_usage:
            yield event(head | {"choices": [], "usage": self.usage.as_json()})
        yield DONE

    def _part(self, index: int, text: str, tokens: Sequence[PlacedToken], finish: str | None) -> dict[str, Any]:
        scores = None if self.body.logprobs is None else self._scores(tokens)
        return {"index": index, "text": text, "logprobs": scores, "finish_reason": finish}

    def _scores(self, tokens: Sequence[PlacedToken]) -> dict[str, Any]:
        """Returns the log-probabilities of tokens, each among its alternatives; a prompt's first token has none."""
        texts = self.served.texts
        values = [None if math.isnan(token.log_probability) else token for _, token in tokens]
        alternatives = [
            token
            and {
                texts.text(number): clamp_log_probability(value)
                for number, value in (*token.alternatives, (token.id, token.log_probability))
            }
            for token in values
        ]
        return {
            "tokens": [texts.text(token.id) for _, token in tokens],
            "token_logprobs": [token and clamp_log_probability(token.log_probability) for token in values],
            "top_logprobs": alternatives if self.body.logprobs else None,
            "text_offset": [start for start, _ in tokens],
        }


def _places(ids: Sequence[int], tokenizer: Tokenizer) -> list[int]:
    """Returns the number of characters before each token in the text of all."""
    text, places = AnswerText(tokenizer, skip_special_tokens=False), []
    for token in ids:
        places.append(text.decoded)
        text.push(token)
    return places
