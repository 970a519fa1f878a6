"""What is asked of the engine, and what it gives: requests, tokens and generations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite
from typing import Any, Literal, Protocol

from torch import Tensor

from stoker.errors import UserError

BASE = ""
"""The adapter of a request that asks for the model without its tuning."""

Ending = Literal["stop", "length", "cancelled", "failed"]
"""Why a generation ended: a stop token, the most tokens, its caller, or an error."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. Log-probabilities are those after penalties and temperature, before any truncation.

    Attributes:
        temperature: divides the logits; 0 takes the likeliest token, and leaves log-probabilities undivided.
        top_k: number of likeliest tokens to draw from; 0 for all.
        top_p: only the smallest set of likeliest tokens with this probability is drawn from (Holtzman et al., 2020).
        min_p: tokens less likely than this share of the likeliest one are not drawn (Nguyen et al., 2024).
        repetition_penalty: divides positive and multiplies negative logits of tokens of the prompt and the answer
            (Keskar et al., 2019).
        presence_penalty: subtracted from the logits of tokens of the answer.
        frequency_penalty: subtracted once for each time that a token is in the answer.
        bias: added to the logits of tokens.
        seed: the draws are a function of it and of the token's number in the answer only.

    Raises:
        UserError: a number is outside of its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        wrong = [
            f"{name} is {value}, and must be {rule}"
            for name, value, holds, rule in (
                ("temperature", self.temperature, 0 <= self.temperature < inf, "at least 0"),
                ("top_k", self.top_k, self.top_k >= 0, "at least 0"),
                ("top_p", self.top_p, 0 < self.top_p <= 1, "above 0 and at most 1"),
                ("min_p", self.min_p, 0 <= self.min_p <= 1, "between 0 and 1"),
                ("repetition_penalty", self.repetition_penalty, 0 < self.repetition_penalty < inf, "above 0"),
                ("presence_penalty", self.presence_penalty, isfinite(self.presence_penalty), "a finite number"),
                ("frequency_penalty", self.frequency_penalty, isfinite(self.frequency_penalty), "a finite number"),
            )
            if not holds
        ]
        if wrong:
            raise UserError(*wrong)

    @property
    def truncates(self) -> bool:
        """Whether some tokens cannot be drawn."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0)

    @property
    def changes_logits(self) -> bool:
        """Whether logits depend on tokens seen before, or are biased."""
        return bool(
            self.repetition_penalty != 1.0 or self.presence_penalty or self.frequency_penalty or self.bias
        )  # fmt: skip


class Constraint(Protocol):
    """What an answer must look like, such as a JSON schema."""

    def mask(self, logits_V: Tensor) -> None:
        """Sets the logits of tokens that may not come next to -inf, in place."""

    def accept(self, token: int) -> None:
        """Moves on by a token."""


@dataclass(frozen=True)
class Request:
    """A prompt to continue.

    Attributes:
        prompt: token ids.
        max_tokens: most tokens of the answer, its stop token included; 0 to score the prompt only.
        stop_ids: tokens that end the answer.
        min_tokens: stop tokens are not drawn before this many others.
        alternatives: likeliest tokens that are given with each token of the answer.
        adapter: name of the adapter to use; None for the model as it is, `BASE` for it without its tuning.
        score_prompt: whether the prompt's own tokens are given with their log-probabilities.
        score_from: place of the first token that is; keys and values before it may come from other requests.
        remember: whether the keys and values are kept for later requests that begin alike.
        constraint: what the answer must look like.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = Sampling()
    stop_ids: frozenset[int] = frozenset()
    min_tokens: int = 0
    alternatives: int = 0
    adapter: str | None = None
    score_prompt: bool = False
    score_from: int = 1
    remember: bool = False
    constraint: Constraint | None = None


@dataclass(frozen=True)
class Token:
    """A token with its log-probability.

    Attributes:
        alternatives: the likeliest tokens at its place and their log-probabilities, the likeliest first.
    """

    id: int
    log_probability: float
    alternatives: tuple[tuple[int, float], ...] = ()


@dataclass(eq=False)
class Generation:
    """The answer to a request as it grows.

    Attributes:
        listener: called in the engine's thread after every token, and once more at the end.
        scored: the prompt's tokens from `Request.score_from` on, where `Request.score_prompt` asked for them.
        ended: None while it is not.
        shared: tokens of the prompt whose keys and values came from an earlier request.
    """

    request: Request
    listener: Listener | None = None
    tokens: list[Token] = field(default_factory=list)
    scored: list[Token] = field(default_factory=list)
    ended: Ending | None = None
    error: BaseException | None = None
    shared: int = 0
    cancelled: bool = False

    def cancel(self) -> None:
        """Ends the answer before its next token; nothing where it has ended."""
        self.cancelled = True

    @property
    def ids(self) -> list[int]:
        """Token ids of the answer, its stop token included."""
        return [token.id for token in self.tokens]

    @property
    def so_far(self) -> tuple[int, ...]:
        """Token ids of the prompt and the answer."""
        return (*self.request.prompt, *self.ids)

    @property
    def unscored(self) -> bool:
        """Whether the prompt's log-probabilities are still to be computed."""
        return self.request.score_prompt and not self.tokens

    def notify(self) -> None:
        """Calls the listener."""
        if self.listener is not None:
            self.listener(self)


Listener = Callable[[Generation], Any]


def answer_ids(generation: Generation) -> Sequence[int]:
    """Token ids of the answer without its stop token."""
    ids = generation.ids
    return ids[:-1] if generation.ended == "stop" and ids and ids[-1] in generation.request.stop_ids else ids
