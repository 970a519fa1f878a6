"""Limits of a tokenizer's definition: the number of characters that it can make of one, and its largest id.

A normalizer that replaces ``a`` by ten of it, twelve times, would need terabytes for a short text.
"""

from __future__ import annotations

import base64
import json
import math
from typing import TYPE_CHECKING, Any

from stoker.errors import Problem, UserError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MOST_GROWTH = 256  # SentencePiece's character maps have 18, Unicode's longest decomposition
MOST_UNUSED = 1_000_000  # more than any vocabulary has tokens


def check_growth(tokenizer: Tokenizer, name: str) -> None:
    """Rejects a tokenizer whose normalizer, pre-tokenizer or decoder can multiply a text.

    Args:
        name: the tokenizer in the error.

    Raises:
        UserError: it can make more than `MOST_GROWTH` characters of one.
    """
    before, after = (tokenizer.normalizer, tokenizer.pre_tokenizer), (tokenizer.decoder,)
    for parts in (before, after):
        if math.prod(_growth(json.loads(part.__getstate__())) for part in parts if part is not None) > MOST_GROWTH:
            message = f"the tokenizer of {name} can make a text more than {MOST_GROWTH} times as long"
            raise UserError(Problem(message, "see Replace and Prepend in its tokenizer.json"))


def check_ids(tokenizer: Tokenizer, name: str) -> None:
    """Rejects a tokenizer whose largest id far exceeds its number of tokens: a list indexed by id would fill memory.

    Raises:
        UserError: more than `MOST_UNUSED` ids below its largest have no token.
    """
    ids = tokenizer.get_vocab(with_added_tokens=True).values()
    if ids and max(ids) - len(ids) > MOST_UNUSED:
        message = f"the tokenizer of {name} has the token id {max(ids):,}, and {len(ids):,} tokens"
        raise UserError(Problem(message, "number the tokens in its tokenizer.json from 0"))


def _growth(part: dict[str, Any]) -> float:
    kind = part["type"]
    if kind == "Sequence":
        steps = next(value for value in part.values() if isinstance(value, list))
        return math.prod(map(_growth, steps))
    if kind == "Replace":
        pattern = part["pattern"].get("String")
        # A regular expression, like an empty string, also matches between two characters.
        return max(1.0, len(part["content"]) / len(pattern)) if pattern else 1.0 + len(part["content"])
    if kind == "Prepend":
        return 1.0 + len(part["prepend"])
    if kind == "Precompiled":
        content = base64.b64decode(part["precompiled_charsmap"])
        trie = 4 + int.from_bytes(content[:4], "little")
        return float(max([1, *(len(text.decode(errors="replace")) for text in content[trie:].split(b"\0"))]))
    return 2.0 if kind == "ByteLevel" else 1.0  # a character for each byte
