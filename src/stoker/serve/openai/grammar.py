"""Answers constrained by a JSON schema, through the library llguidance."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from stoker.data.text_codec import TextCodec
from stoker.serve.api_error import ApiError, bad_request

if TYPE_CHECKING:
    from llguidance import LLMatcher

ANY_OBJECT = {"type": "object"}
NO_TOKEN = "NoExtensionBias"  # llguidance's error where no token may follow
COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON in the format of Python's `json.dumps`. With free white space some models write only that until they are cut."""


class Grammars:
    """Constraints for one tokenizer."""

    def __init__(self, codec: TextCodec, *, vocabulary: int) -> None:
        """
        Args:
            vocabulary: width of the model's logits.
        """
        self._codec, self._vocabulary = codec, vocabulary
        self._tokenizer: Any = None

    def of_schema(self, schema: dict[str, Any], *, param: str, stop_ids: Collection[int]) -> SchemaConstraint:
        """Returns the constraint of a JSON schema. Takes up to a second for a complicated schema.

        Raises:
            ApiError: the schema is invalid, or uses features that the library lacks.
        """
        try:
            from llguidance import LLMatcher, LLTokenizer
        except ImportError:
            raise ApiError(501, "response_format needs llguidance: pip install 'stoker[serve]'") from None
        if self._tokenizer is None:
            size = max(self._codec.vocabulary, self._codec.tokenizer.get_vocab_size())
            ends = sorted(self._codec.stop_ids) or None
            self._tokenizer = LLTokenizer(self._codec.definition, n_vocab=size, eos_token=ends)
        try:
            grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults=COMPACT)  # type: ignore[arg-type]
        except (ValueError, RecursionError) as error:  # it is nested too deeply
            raise bad_request(f"the JSON schema cannot be followed: {str(error)[:300]}", param=param) from None
        failed, messages = LLMatcher.validate_grammar_with_warnings(grammar, self._tokenizer)
        if failed:
            raise bad_request(f"the JSON schema cannot be followed: {'; '.join(messages)[:300]}", param=param)
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0)
        matcher.compute_bitmask()  # fails if no text follows the schema
        if matcher.is_error():
            raise bad_request(f"the JSON schema cannot be followed: {_reason(matcher)}", param=param)
        known = frozenset(token for token in stop_ids if token < self._vocabulary)
        return SchemaConstraint(matcher, self._tokenizer.vocab_size, known)


def _reason(matcher: LLMatcher) -> str:
    """Returns the error of a matcher without its state, which llguidance adds in further lines."""
    reason = matcher.get_error().partition("\n")[0]
    return "it allows no text" if reason == NO_TOKEN else reason[:300]


class SchemaConstraint:
    """Restricts an answer to continuations that a schema allows; a `stoker.generate.request.Constraint`.

    Attributes:
        done: whether the answer is complete.
        failed: why the answer cannot continue; empty while it can.
    """

    def __init__(self, matcher: LLMatcher, vocabulary: int, stop_ids: frozenset[int]) -> None:
        from llguidance.torch import allocate_token_bitmask

        self._matcher, self._stop_ids = matcher, sorted(stop_ids)
        self._mask = allocate_token_bitmask(1, vocabulary)
        self._vocabulary = vocabulary
        self.done, self.failed = False, ""

    def copy(self) -> SchemaConstraint:
        """Returns the constraint in its initial state, for another answer."""
        return SchemaConstraint(self._matcher.deep_copy(), self._vocabulary, frozenset(self._stop_ids))

    def mask(self, logits_V: Tensor) -> None:
        """Sets the logits of forbidden next tokens to -inf, in place."""
        from llguidance.torch import fill_next_token_bitmask

        fill_next_token_bitmask(self._matcher, self._mask)
        if self._matcher.is_error():  # a limit of the library is exceeded: the listener ends the answer
            self.failed = _reason(self._matcher)
            return
        bits_32 = torch.arange(32, dtype=torch.int32)
        allowed_V = ((self._mask[0][:, None] >> bits_32) & 1).bool().flatten()[: logits_V.shape[0]]
        forbidden_V = torch.ones(logits_V.shape[0], dtype=torch.bool)
        forbidden_V[: allowed_V.shape[0]] = ~allowed_V
        if self._matcher.is_accepting():
            forbidden_V[self._stop_ids] = False
        logits_V.masked_fill_(forbidden_V.to(logits_V.device), -torch.inf)

    def accept(self, token: int) -> None:
        """Advances the constraint by a token."""
        if token in self._stop_ids:
            self.done = True
            return
        self._matcher.consume_token(token)
        self.done = self._matcher.is_stopped()
