"""Maps tokens to the bytes they encode, for the two kinds of tokenizers that have a token for every byte."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from stoker.data.tokenizers.wordpiece import inside_of

SPACE = "▁"
"""Sentencepiece's character for a space (U+2581)."""

_FALLBACK = re.compile(r"<0x([0-9A-F]{2})>")
Kind = Literal["byte-level", "fallback"]


def _printable() -> dict[str, int]:
    """Returns the byte of each character in byte-level tokens: printable bytes are themselves (GPT-2)."""
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(seen)]
    return {chr(byte): byte for byte in seen} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_OF = _printable()


def kind_of(definition: dict[str, Any]) -> Kind | None:
    """Returns how a tokenizer (the content of its ``tokenizer.json``) writes bytes; None if it cannot write all.

    ``byte-level``: every character of a token is a byte. ``fallback``: tokens are text, and ``<0xE4>`` a byte.
    """
    step = definition.get("pre_tokenizer") or {}
    if any(inner.get("type") == "ByteLevel" for inner in step.get("pretokenizers", [step])):
        return "byte-level"
    return "fallback" if definition["model"].get("byte_fallback") else None


def byte_of(token: str) -> int | None:
    """Returns the byte that a token of the form ``<0xE4>`` is; None for all others."""
    found = _FALLBACK.fullmatch(token)
    return int(found[1], 16) if found else None


def bytes_of(token: str, kind: Kind) -> bytes:
    """Returns the bytes of text that a token encodes."""
    if kind == "byte-level":
        # Other characters occur in added tokens only.
        return b"".join(bytes((BYTE_OF[c],)) if c in BYTE_OF else c.encode() for c in token)
    byte = byte_of(token)
    return token.replace(SPACE, " ").encode() if byte is None else bytes((byte,))


def byte_lengths(definition: dict[str, Any]) -> np.ndarray | None:
    """Returns the bytes of text by token id, shape (ids,); 0 for special tokens. None if not every byte has a token."""
    kind = kind_of(definition)
    if kind is None:
        return None
    added = {token["id"]: token for token in definition.get("added_tokens") or ()}
    vocabulary, inside = ids_of(definition), inside_of(definition["model"])
    lengths = np.zeros(max([*vocabulary.values(), *added], default=-1) + 1, dtype=np.int64)
    for token, number in vocabulary.items():
        lengths[number] = len(bytes_of(token.removeprefix(inside), kind))
    for number, token in added.items():
        lengths[number] = 0 if token["special"] else len(token["content"].encode())
    return lengths


def ids_of(definition: dict[str, Any]) -> dict[str, int]:
    """Returns the model's own tokens and their ids, without added ones."""
    vocabulary: dict[str, int] | Sequence[tuple[str, float]] = definition["model"]["vocab"]
    if isinstance(vocabulary, dict):
        return dict(vocabulary)
    return {piece: number for number, (piece, _) in enumerate(vocabulary)}
