"""Input and output of the engine: requests, tokens and generations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite
from typing import Any, Literal, Protocol

from torch import Tensor

from stoker.errors import UserError

BASE = ""
"""The adapter name for the model without its tuning."""

Ending = Literal["stop", "length", "cancelled", "failed"]
"""Reason why a generation ended: a stop token, the token limit, its caller, or an error."""


@dataclass(frozen=True)
class Sampling:
    """Sampling settings. Log-probabilities are those after penalties and temperature, before any truncation.

    Attributes:
        temperature: divides the logits; 0 for greedy decoding, with undivided log-probabilities.
        top_k: number of likeliest tokens to sample from; 0 for all.
        top_p: samples only from the smallest set of likeliest tokens with this probability (Holtzman et al., 2020);
            0 for the likeliest one.
        min_p: excludes tokens less likely than this share of the likeliest one (Nguyen et al., 2024).
        repetition_penalty: divides positive and multiplies negative logits of tokens of the prompt and the answer
            (Keskar et al., 2019).
        presence_penalty: subtracted from the logits of tokens of the answer.
        frequency_penalty: subtracted once for each occurrence of a token in the answer.
        bias: added to the logits of tokens.
        seed: samples depend only on it and on the token's index in the answer.

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
                ("top_p", self.top_p, 0 <= self.top_p <= 1, "between 0 and 1"),
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
        """Whether some tokens are excluded from sampling."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0)

    @property
    def changes_logits(self) -> bool:
        """Whether logits depend on earlier tokens, or are biased."""
        return bool(
            self.repetition_penalty != 1.0 or self.presence_penalty or self.frequency_penalty or self.bias
        )  # fmt: skip


class Constraint(Protocol):
    """Constraint on an answer, such as a JSON schema."""

    def mask(self, logits_V: Tensor) -> None:
        """Sets the logits of forbidden next tokens to -inf, in place."""

    def accept(self, token: int) -> None:
        """Advances the constraint by a token."""


@dataclass(frozen=True)
class Request:
    """A prompt to continue.

    Attributes:
        prompt: token ids.
        max_tokens: most tokens of the answer, including its stop token; 0 to score the prompt only.
        stop_ids: tokens that end the answer.
        min_tokens: number of tokens before which stop tokens are excluded.
        alternatives: number of likeliest tokens returned with each token of the answer.
        adapter: name of the adapter; None for the model as it is, `BASE` for it without its tuning.
        score_prompt: whether to return the prompt's tokens with their log-probabilities.
        score_from: index of the first scored token; keys and values before it may come from other requests.
        remember: whether to cache the keys and values for later requests with a common prefix.
        constraint: constraint on the answer.
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
        alternatives: the likeliest tokens at its place with their log-probabilities, in descending order.
    """

    id: int
    log_probability: float
    alternatives: tuple[tuple[int, float], ...] = ()


@dataclass(eq=False)
class Generation:
    """The growing answer to a request.

    Attributes:
        listener: called in the engine's thread after every token, and once more at the end.
        scored: the prompt's tokens from `Request.score_from` on, with `Request.score_prompt`.
        ended: reason of the end; None before.
        shared: tokens of the prompt whose keys and values came from the prefix cache.
        seen_V, seen: for the repetition penalty: whether each token of the vocabulary is in the prompt or in the first
            ``seen`` tokens of the answer; None before the first step and after the end.
    """

    request: Request
    listener: Listener | None = None
    tokens: list[Token] = field(default_factory=list)
    scored: list[Token] = field(default_factory=list)
    ended: Ending | None = None
    error: BaseException | None = None
    shared: int = 0
    cancelled: bool = False
    seen_V: Tensor | None = field(default=None, compare=False, repr=False)
    seen: int = 0

    def cancel(self) -> None:
        """Ends the answer before its next token; no effect after its end."""
        self.cancelled = True

    @property
    def ids(self) -> list[int]:
        """Token ids of the answer, including its stop token."""
        return [token.id for token in self.tokens]

    @property
    def so_far(self) -> tuple[int, ...]:
        """Token ids of the prompt and the answer."""
        return (*self.request.prompt, *self.ids)

    @property
    def unscored(self) -> bool:
        """Whether the prompt's log-probabilities have yet to be computed."""
        return self.request.score_prompt and not self.tokens

    def notify(self) -> None:
        """Calls the listener."""
        if self.listener is not None:
            self.listener(self)


Listener = Callable[[Generation], Any]


def answer_ids(generation: Generation) -> Sequence[int]:
    """Returns the token ids of the answer without its stop token."""
    ids = generation.ids
    return ids[:-1] if generation.ended == "stop" and ids and ids[-1] in generation.request.stop_ids else ids
