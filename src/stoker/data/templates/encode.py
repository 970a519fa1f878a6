"""Encodes text with ``tokenizers``, and maps character positions to tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property

from tokenizers import Encoding, Tokenizer

from stoker.errors import Problem, UserError, reason_of

Encoded = tuple[list[int], list[tuple[int, bool]]]
"""A text's ids and, for each position, (tokens that begin before it, whether one spans it)."""


class Encoder:
    """Encodes with a ``tokenizer.json``. Each process has its own."""

    def __init__(self, definition: str) -> None:
        self._definition = definition

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer without truncation and padding."""
        return without_truncation(self._definition)

    @cached_property
    def _bare(self) -> Tokenizer:
        return without_truncation(without_post_processor(self._definition))

    def encode_documents(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the ids of documents, with the tokens that the tokenizer puts around one (such as ``<s>``)."""
        encodings = _encode_batch(self.tokenizer, texts, offsets=False, add_special_tokens=True)
        return [e.ids for e in encodings]

    def encode(self, texts: Sequence[str], places: Sequence[Sequence[int]]) -> list[Encoded]:
        """Returns the ids of texts without special tokens, and the token indices of ``places`` (in characters,
        ascending).
        """
        encodings = _encode_batch(self._bare, texts)
        return [
            (e.ids, [find_place(e, place, len(text)) for place in at])
            for e, text, at in zip(encodings, texts, places, strict=True)
        ]

    def encode_one(self, text: str) -> list[int]:
        """Returns the ids of one text, with no special tokens added."""
        (encoding,) = _encode_batch(self._bare, [text], offsets=False)
        return encoding.ids

    def encode_beginning(self, text: str) -> list[int]:
        """Encodes the first part of a document, after the tokenizer's prefix tokens (such as ``<s>``)."""
        return [*self._before, *self.encode_one(text)]

    def beginning_places(self, text: str) -> list[int]:
        """Returns the character of a text at which each token of `encode_beginning` begins; 0 for prefix tokens."""
        (encoding,) = _encode_batch(self._bare, [text])
        return [0] * len(self._before) + [first for first, _ in encoding.offsets]

    @cached_property
    def _before(self) -> list[int]:
        words = ("a", *self.tokenizer.get_vocab(with_added_tokens=False))
        found = (self.tokenizer.encode(word) for word in words)
        whole = next((e for e in found if any(number is not None for number in e.sequence_ids)), None)
        if whole is None:
            return []
        first = next(place for place, number in enumerate(whole.sequence_ids) if number is not None)
        return whole.ids[:first]


def _encode_batch(
    tokenizer: Tokenizer, texts: Sequence[str], *, offsets: bool = True, add_special_tokens: bool = False
) -> list[Encoding]:
    """Encodes texts. A batch, unlike a single text, is encoded without Python's lock: other threads go on.

    Raises:
        UserError: the tokenizer fails, as its definition asks for what cannot be computed.
    """
    encode = tokenizer.encode_batch if offsets else tokenizer.encode_batch_fast
    try:
        return encode(list(texts), add_special_tokens=add_special_tokens)
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # a panic in Rust, which is not an Exception
            raise
        message = f"the tokenizer fails on a text: {reason_of(RuntimeError(*error.args))}"
        raise UserError(Problem(message, "see the patterns in its tokenizer.json", key="model")) from None


def without_truncation(definition: str) -> Tokenizer:
    """Returns the tokenizer of a ``tokenizer.json``, without truncation and padding."""
    tokenizer = Tokenizer.from_str(definition)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def without_post_processor(definition: str) -> str:
    """Returns the tokenizer with untrimmed offsets; byte-level post-processors trim white space off."""
    return json.dumps({**json.loads(definition), "post_processor": None})


def find_place(encoding: Encoding, place: int, length: int) -> tuple[int, bool]:
    """Returns (tokens that begin before a character position, whether one of them spans it)."""
    at = place
    while at < length:
        token = encoding.char_to_token(at)
        if token is None:  # a character without a token
            at += 1
            continue
        first = token
        while token < len(encoding) and _begin(encoding, token) < place:
            token += 1
        return token, token > first
    return len(encoding), False


def _begin(encoding: Encoding, token: int) -> int:
    span: tuple[int, int] | None = encoding.token_to_chars(token)
    assert span is not None, "without added tokens, every token has a span"
    return span[0]
