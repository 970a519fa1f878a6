"""Tokens, types and scores of a GGUF's vocabulary, and where llama.cpp puts a space before a text.

llama.cpp merges the pieces of a sentencepiece vocabulary by score: any two neighbours that together are a token. A
``tokenizer.json`` lists merges by rank. Both give the same tokens if every pair of tokens that makes a token is a
merge, and the merges are in the order of the tokens they make, as transformers' conversion leaves them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from itertools import groupby
from typing import Any, Literal

SPACE = "▁"
SPACED = "{{ ' ' }}"  # before a chat template: the space that the tokenizer puts before a whole text
KEEPING = {"<unk>", "<s>", "<|endoftext|>"}  # llama.cpp skips no blanks after these tokens of Phi-3
Prefix = Literal["never", "each", "always", "first"]
"""Where a tokenizer puts a space before a text: before each part between special tokens (``each``), before those that
begin with none (``always``), or only before a whole text that begins with none (``first``)."""

_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
_REPLACED = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
_PREPENDED = {"type": "Prepend", "prepend": SPACE}


class Unsupported(Exception):
    """GGUF cannot express the tokenizer; the message is the reason."""


def token_list(
    vocabulary: dict[int, str], added: dict[int, Any], vocab_size: int
) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Returns tokens and their types by id, padded to the model's vocabulary."""
    from gguf import TokenType

    tokens, types, strips = [], [], skips_blanks(added)
    for token_id in range(vocab_size):
        kind = TokenType.NORMAL
        if token_id not in vocabulary:
            kind = TokenType.UNUSED
        elif token_id in added:
            token = added[token_id]
            if token.lstrip or (token.rstrip and not strips) or token.single_word:
                raise Unsupported(f"the added token {token.content!r} strips blanks or asks for a whole word")
            kind = TokenType.CONTROL if token.special else TokenType.USER_DEFINED
        tokens.append(vocabulary.get(token_id, f"[PAD{token_id}]"))
        types.append(int(kind))
    if len(set(tokens)) != len(tokens):
        raise Unsupported("two ids have the same token")
    return tuple(tokens), tuple(types)


def skips_blanks(added: dict[int, Any]) -> bool:
    """Returns whether blanks after added tokens are skipped as llama.cpp does for models named Phi-3."""
    skipped = {token.content: token.rstrip for token in added.values()}
    return skipped.keys() >= KEEPING and all(skips == (token not in KEEPING) for token, skips in skipped.items())


def space_prefix(description: dict[str, Any]) -> Prefix:
    """Returns where a sentencepiece tokenizer puts a space, by its ``tokenizer.json``.

    Raises:
        Unsupported: it does more to a text than sentencepiece.
    """
    normalizer, splitter = description["normalizer"], description["pre_tokenizer"]
    steps = normalizer["normalizers"] if normalizer and normalizer["type"] == "Sequence" else [normalizer]
    match splitter:
        case {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": False} if normalizer is None:
            return scheme  # tokenizers knows these three
        # Without spaces there is nothing to split at.
        case None | {"type": "Split", "pattern": {"String": " "}} if steps == [_REPLACED]:
            return "never"
        case None | {"type": "Split", "pattern": {"String": " "}} if steps == [_PREPENDED, _REPLACED]:
            return "each"
    raise Unsupported("the tokenizer changes or splits texts otherwise than sentencepiece")


def comparable(text: str, prefix: Prefix, *, adds_space: bool, special: Collection[str]) -> bool:
    """Returns whether llama.cpp puts the spaces before a text that the tokenizer does.

    Where it adds spaces, it also adds one before a text that begins with a space. Where it adds none, a text must begin
    with a space or a special token.
    """
    if prefix in ("never", "each"):
        return True
    return not text.startswith(" ") if adds_space else text.startswith((" ", *special))


def with_pieces(model: dict[str, Any], tokens: Sequence[str], types: Sequence[int]) -> tuple[tuple[int, ...], Any]:
    """Returns the types with those of bytes and of the unknown token, and the score of each token.

    The score is minus the rank of the token's first merge, among tokens; that of the others has no effect.

    Raises:
        Unsupported: llama.cpp would merge otherwise.
    """
    from gguf import TokenType

    merges = [tuple(m.split(" ", 1) if isinstance(m, str) else m) for m in model["merges"]]
    made = ["".join(merge) for merge in merges]
    ranks = {token: rank for rank, token in enumerate(dict.fromkeys(made))}
    # Runs of one character (Gemma's spaces) grow from the left in either order.
    varied = [token for token, _ in groupby(made) if len(set(token)) > 1]
    if len(varied) != len(set(varied)):
        raise Unsupported("the tokenizer's merges are not in the order of the tokens they make")
    kinds = list(types)
    for number, token in enumerate(tokens):
        if _BYTE.fullmatch(token) and kinds[number] == TokenType.NORMAL:
            kinds[number] = TokenType.BYTE
        elif token == model["unk_token"]:
            kinds[number] = TokenType.UNKNOWN
        elif kinds[number] == TokenType.USER_DEFINED and token in ranks and SPACE in token:
            kinds[number] = TokenType.NORMAL  # Gemma's spaces: written as SPACE, they never match a text
    if kinds.count(TokenType.BYTE) != 256:
        raise Unsupported("the tokenizer has not a token for each byte")
    pieces = {token for token, kind in zip(tokens, kinds, strict=True) if kind == TokenType.NORMAL}
    known = set(merges)
    for token in pieces.union(token for token in tokens if SPACE in token):
        for cut in range(1, len(token)):
            pair = token[:cut], token[cut:]
            if pair not in known and pair[0] in pieces and pair[1] in pieces:
                raise Unsupported(f"{pair[0]!r} and {pair[1]!r} are no merge, but llama.cpp would merge them")
    return tuple(map(int, kinds)), tuple(-float(ranks.get(token, 0)) for token in tokens)
