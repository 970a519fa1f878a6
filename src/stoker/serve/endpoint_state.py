"""State that the endpoints share: models, the engines' thread, limits and counters."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any, TypeVar

from stoker.generate.request import Request, Sampling
from stoker.hardware.process.openmp import in_temporary_thread
from stoker.serve.api_error import bad_request
from stoker.serve.engine_thread import EngineThread
from stoker.serve.metrics import CALLER, Metrics
from stoker.serve.openai.grammar import SchemaConstraint
from stoker.serve.openai.sampling_fields import SHORTEST, SamplingFields
from stoker.serve.served_models.served import Models, Served
from stoker.serve.server_options import ServerOptions
from stoker.serve.server_state import ServerState

T = TypeVar("T")
ANSWER_STEP = 0x9E3779B97F4A7C15  # difference between the seeds of a request's answers


class Service(ServerState):
    """State of a server of language models."""

    def __init__(self, models: Models, worker: EngineThread, options: ServerOptions, metrics: Metrics) -> None:
        super().__init__(options, metrics)
        self.models, self.worker = models, worker
        self._texts = ThreadPoolExecutor(1, "texts")

    @property
    def alive(self) -> bool:
        return self.worker.alive

    async def in_texts_thread(self, function: Callable[[], T]) -> T:
        """Runs rendering, tokenising or compiling outside of the event loop, one call at a time."""
        return await asyncio.get_running_loop().run_in_executor(self._texts, function)

    async def in_loading_thread(self, function: Callable[[], T]) -> T:
        """Loads weights outside of the event loop, one call at a time and not together with texts."""
        return await self.in_texts_thread(lambda: in_temporary_thread(function))

    @contextmanager
    def using(self, name: str) -> Iterator[Served]:
        """Finds a model by its name, and keeps it in memory within the block.

        Raises:
            ApiError: there is no such model.
        """
        served = self.models.find(name)
        served.users += 1
        begun = time.monotonic()
        try:
            yield served
        finally:
            served.users -= 1
            self.metrics.answers.labels(name, CALLER.get()).observe(time.monotonic() - begun)


class Usage:
    """Token counts of a request, for its response and the metrics."""

    def __init__(self, service: Service, served: Served) -> None:
        self._metrics, self._of = service.metrics, (served.name, CALLER.get())
        self._begun = time.monotonic()
        self._first = True
        self.prompt = self.shared = self.answer = 0

    def prompt_of(self, tokens: int) -> None:
        """Counts a prompt, once for all of its answers."""
        self.prompt += tokens
        self._metrics.prompt_tokens.labels(*self._of).inc(tokens)

    def token_came(self) -> None:
        """Called with every increment of an answer."""
        if self._first:
            self._first = False
            self._metrics.first_token.labels(*self._of).observe(time.monotonic() - self._begun)

    def answer_of(self, tokens: int, shared: int) -> None:
        """Counts a finished answer."""
        self.answer += tokens
        self.shared += shared
        self._metrics.answer_tokens.labels(*self._of).inc(tokens)
        self._metrics.shared_tokens.labels(*self._of).inc(shared)

    def as_json(self) -> dict[str, Any]:
        """Returns the ``usage`` of a response."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.answer,
            "total_tokens": self.prompt + self.answer,
            "prompt_tokens_details": {"cached_tokens": min(self.shared, self.prompt)},
        }


def response_head(kind: str, served: Served, prefix: str) -> dict[str, Any]:
    """Returns the fields with which a response, and every event of a stream, begins.

    Args:
        kind: value of ``object``.
        prefix: beginning of the response's id.
    """
    return {
        "id": f"{prefix}-{secrets.token_hex(12)}",
        "object": kind,
        "created": int(time.time()),
        "model": served.name,
        "system_fingerprint": f"stoker-{version('stoker')}",
    }


def engine_requests(
    body: SamplingFields,
    served: Served,
    prompt: Sequence[int],
    *,
    max_tokens: int,
    alternatives: int,
    score_prompt: bool = False,
    remember: bool = False,
    constraint: SchemaConstraint | None = None,
) -> list[Request]:
    """Returns the engine's requests for the n answers to a prompt.

    Raises:
        ApiError: it names tokens that the model does not have, or its least length is above its greatest.
    """
    if body.min_tokens > max_tokens:
        raise bad_request(f"min_tokens is {body.min_tokens:,}, above max_tokens, {max_tokens:,}", param="min_tokens")
    served.check_ids(prompt, param="prompt")
    served.check_ids(body.stop_token_ids, param="stop_token_ids")
    bias = _bias(body)
    served.check_ids([token for token, _ in bias], param="logit_bias")
    own = frozenset(stop for stop in served.opened.codec.stop_ids if stop < served.host.vocabulary)
    stop_ids = (frozenset() if body.ignore_eos else own) | frozenset(body.stop_token_ids)
    seed = secrets.randbits(64) if body.seed is None else body.seed
    return [
        Request(
            prompt=tuple(prompt),
            max_tokens=max_tokens,
            sampling=Sampling(
                temperature=body.temperature if body.temperature >= SHORTEST else 0.0,
                top_k=max(0, min(body.top_k, served.host.vocabulary)),
                top_p=body.top_p,
                min_p=body.min_p,
                repetition_penalty=body.repetition_penalty,
                presence_penalty=body.presence_penalty,
                frequency_penalty=body.frequency_penalty,
                bias=bias,
                seed=(seed + number * ANSWER_STEP) % 2**64,
            ),
            stop_ids=stop_ids,
            min_tokens=body.min_tokens,
            alternatives=min(alternatives, served.host.vocabulary),
            adapter=served.adapter,
            score_prompt=score_prompt,
            remember=remember,
            constraint=None if constraint is None else constraint.copy(),
        )
        for number in range(body.n)
    ]


def _bias(body: SamplingFields) -> tuple[tuple[int, float], ...]:
    """Returns (token, bias) of a request.

    Raises:
        ApiError: a key is not the text of a number; "01" would be a second key of token 1.
    """
    keys = [int(key) for key in body.logit_bias if key.isascii() and key.isdecimal() and len(key) < 10]
    if list(map(str, keys)) != list(body.logit_bias):
        raise bad_request("the keys of logit_bias are token ids, as text", param="logit_bias")
    return tuple(zip(keys, body.logit_bias.values(), strict=True))
