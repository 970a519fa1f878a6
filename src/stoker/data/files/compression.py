"""Tokens that a tokenizer needs for texts, compared with another tokenizer."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tokenizers import Tokenizer

from stoker.grouping import grouped_from

HELD_OUT = 20  # every twentieth part is held out
PART = 1 << 12  # characters of a text that are held out, or learnt from, together


@dataclass(frozen=True)
class Compression:
    """Two tokenizers on the same texts.

    Attributes:
        before, after: tokens; ``before`` is None if there is no earlier tokenizer.
        same: texts with equal ids.
        restored: texts that decode as with the earlier tokenizer, or without one, to themselves.
        used: number of distinct new tokens in them.
    """

    name: str
    texts: int
    characters: int
    before: int | None
    after: int
    same: int
    restored: int
    used: int

    @property
    def fewer(self) -> float | None:
        """Fraction of the tokens that are saved."""
        return 1 - self.after / self.before if self.before else None

    def as_json(self) -> dict[str, Any]:
        """Returns the values for `--json`."""
        return {
            **asdict(self),
            "fewer": self.fewer,
            "characters_per_token": self.characters / max(1, self.after),
            "characters_per_token_before": self.characters / self.before if self.before else None,
        }


def compression(
    name: str, texts: Sequence[str], tokenizer: Tokenizer, *, earlier: Tokenizer | None = None, first: int = 0
) -> Compression:
    """Encodes and decodes texts.

    Args:
        earlier: the tokenizer to compare with.
        first: the first new id.
    """
    ids, known = _encoded(tokenizer, texts), [] if earlier is None else _encoded(earlier, texts)
    # Some tokenizers change texts (normalise them, drop a first space): what counts is that nothing more is lost.
    expected = texts if earlier is None else _decoded(earlier, known)
    return Compression(
        name,
        len(texts),
        _total(texts),
        None if earlier is None else _total(known),
        _total(ids),
        same=sum(map(operator.eq, ids, known)),
        restored=sum(map(operator.eq, _decoded(tokenizer, ids), expected)),
        used=len({number for own in ids for number in own if number >= first}),
    )


def split_at_lines(texts: Iterable[str]) -> Iterator[str]:
    """Yields texts in parts of about `PART` characters, cut at the ends of lines."""
    for text in texts:
        if len(text) <= PART:
            yield text
        else:
            yield from map("".join, grouped_from(text.splitlines(keepends=True), len, PART))


def split_held_out(texts: Sequence[str]) -> tuple[list[str], list[str]]:
    """Splits texts into (training, held out): every twentieth text is held out, and at least one of two or more."""
    step = min(HELD_OUT, max(2, len(texts)))
    return [t for i, t in enumerate(texts) if i % step != step - 1], list(texts[step - 1 :: step])


def _encoded(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    return [encoding.ids for encoding in tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]


def _decoded(tokenizer: Tokenizer, ids: Sequence[Sequence[int]]) -> list[str]:
    return tokenizer.decode_batch([list(own) for own in ids], skip_special_tokens=False)


def _total(items: Sequence[Sequence[Any]]) -> int:
    return sum(len(item) for item in items)
