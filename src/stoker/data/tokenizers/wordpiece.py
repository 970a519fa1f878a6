"""WordPiece: trains it over bytes, and extends tokenizers of BERT's kind.

A word is split from its start by the longest piece that fits; pieces inside a word begin with ``##``. A word with a
character that has no piece is one unknown token. So a new piece changes only the words that contain it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from stoker.data.tokenizers.writing_systems import are_letters, codes_of

INSIDE = "##"  # begins a piece inside of a word
LONGEST_WORD = 32  # bytes: the search for pieces takes the square of it


def learn_wordpiece(texts: Iterable[str], size: int, special: Sequence[str]) -> Tokenizer:
    """Trains a WordPiece tokenizer of ``size`` ids over bytes: no text is unknown, and every text decodes to itself.

    Each byte has a piece for the start of a word and one for its inside. ``#`` is a separate word, so that only pieces
    inside words begin with ``##``.
    """
    tokenizer = Tokenizer(models.WordPiece({}, unk_token=special[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split("#", "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
            pre_tokenizers.Split(Regex(f".{{{LONGEST_WORD}}}"), "isolated"),
        ]
    )
    tokenizer.decoder = decoders.Sequence([decoders.Replace(Regex(f"^{INSIDE}"), ""), decoders.ByteLevel()])
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.WordPieceTrainer(
        vocab_size=size, special_tokens=list(special), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    content = json.loads(tokenizer.to_str())
    vocabulary = content["model"]["vocab"]
    missing = [INSIDE + byte for byte in alphabet if INSIDE + byte not in vocabulary]
    kept = sorted(vocabulary, key=vocabulary.__getitem__)[: size - len(missing)]  # the last ones are the rarest
    content["model"]["vocab"] = {token: number for number, token in enumerate([*kept, *missing])}
    return Tokenizer.from_str(json.dumps(content))


def inside_of(model: dict[str, Any]) -> str:
    """Returns the prefix of pieces inside a word; empty for other models than WordPiece."""
    return str(model.get("continuing_subword_prefix") or "") if model.get("type") == "WordPiece" else ""


def unknown_of(model: dict[str, Any]) -> int | None:
    """Returns the id of WordPiece's unknown token."""
    return model["vocab"].get(model["unk_token"]) if model.get("type") == "WordPiece" else None


def missing_inside(model: dict[str, Any], scripts: frozenset[str]) -> list[str]:
    """Returns characters without a piece inside of a word that other pieces with letters of these scripts hold.

    A new piece changes the rest of a word that remains to be cut, which must not become unknown.
    """
    inside, vocabulary = inside_of(model), model["vocab"]
    texts = [token.removeprefix(inside) for token in vocabulary]
    held = {character for text in texts if text and are_letters(codes_of(text), scripts).any() for character in text}
    return sorted(inside + character for character in held if inside + character not in vocabulary)


def unknown_words(
    tokenizer: Tokenizer, texts: Iterable[str], scripts: frozenset[str], model: dict[str, Any]
) -> Counter[str]:
    """Returns the count of each word, normalised, that is an unknown token and consists of letters of these scripts."""
    unknown, normalizer = unknown_of(model), tokenizer.normalizer
    counted: Counter[str] = Counter()
    for text in texts:
        encoding = tokenizer.encode(text, add_special_tokens=False)
        for number, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            word = text[start:end]
            if number != unknown or not word or not are_letters(codes_of(word), scripts).all():
                continue
            word = normalizer.normalize_str(word).strip() if normalizer is not None else word
            if word and len(word) <= model["max_input_chars_per_word"]:
                counted[word] += 1
    return counted


def pieces_of(word: str, inside: str) -> list[str]:
    """Returns the characters of a word as pieces."""
    return [word[:1], *(inside + character for character in word[1:])]
