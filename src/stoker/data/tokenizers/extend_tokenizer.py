"""Extends a tokenizer by new tokens, learnt from texts on top of its own encoding.

New merges are learnt over the tokens of the old encoding, within the tokenizer's own pre-tokenised words. They rank
after all old merges and make only new tokens, so the old merges apply first, as before. New tokens contain only letters
of the learnt scripts (and the space before them): a text without such letters keeps its ids.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from tokenizers import Encoding, Tokenizer

from stoker.data.templates.encode import without_post_processor, without_truncation
from stoker.data.tokenizers.bpe_merges import Merge, Symbol, learn_merges
from stoker.data.tokenizers.merge_symbols import Numbered, old_ids
from stoker.data.tokenizers.token_bytes import Kind, byte_of, ids_of, kind_of
from stoker.data.tokenizers.wordpiece import inside_of, missing_inside, unknown_of, unknown_words
from stoker.data.tokenizers.writing_systems import are_letters, codes_of, script_of, to_learn
from stoker.errors import Problem, UserError
from stoker.grouping import grouped_from

LOOKED_AT = 1 << 21  # characters from which the scripts are found
AT_ONCE = 1 << 20  # characters encoded at a time
LAST_RESORT = -1.0  # how far the scores of new Unigram pieces are below all old scores


@dataclass(frozen=True)
class Extended:
    """A tokenizer with new tokens.

    Attributes:
        definition: the content of its ``tokenizer.json``.
        first: the first new id; all ids below it are unchanged.
        tokens: the new tokens, in the order of their ids.
        pieces: for each new token, the ids that encoded it before.
        scripts: scripts whose letters the new tokens contain.
    """

    definition: str
    first: int
    tokens: tuple[str, ...]
    pieces: tuple[tuple[int, ...], ...]
    scripts: tuple[str, ...]


def refusal(definition: dict[str, Any]) -> str | None:
    """Returns why a tokenizer (the content of its ``tokenizer.json``) cannot be extended; None if it can."""
    model = definition["model"]
    if model.get("type") not in ("BPE", "Unigram", "WordPiece"):
        return f"it is a {model.get('type')} tokenizer, and only BPE, Unigram and WordPiece ones can take new tokens"
    if model["type"] == "WordPiece":
        return None if inside_of(model) else "it does not mark pieces inside of words"
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        return "it marks tokens by their place in a word, so a merge of two is not their texts together"
    if kind_of(definition) is None:
        return "it does not have a token for every byte: unknown characters are lost before they can be learned"
    if model["type"] == "Unigram" and kind_of(definition) == "byte-level":
        return "it is a Unigram tokenizer over bytes: learn a larger one"
    return None


def extend(definition: str, texts: Sequence[str], size: int) -> Extended:
    """Adds up to ``size`` tokens; fewer where no further pair of tokens occurs twice in the texts.

    Raises:
        UserError: this kind of tokenizer cannot be extended, or the texts hold no letters.
    """
    content = json.loads(definition)
    why = refusal(content)
    if why:
        raise UserError(Problem(f"the tokenizer cannot be extended: {why}"))
    kind = kind_of(content) or "fallback"  # WordPiece's pieces are text, too
    tokenizer = without_truncation(without_post_processor(definition))
    ids = ids_of(content)
    found = {number: byte_of(token) for token, number in ids.items() if kind == "fallback"}
    bytes_by_id = {number: byte for number, byte in found.items() if byte is not None}
    inside, unknown = inside_of(content["model"]), unknown_of(content["model"])
    scripts = scripts_to_learn(tokenizer, texts, bytes_by_id, unknown)
    if not scripts:
        raise UserError(Problem("the corpus holds no letters", "give texts in the language to be learned"))
    added = frozenset(token["id"] for token in content["added_tokens"])
    runs = _counted_runs(tokenizer, texts, scripts, added, bytes_by_id)
    numbered = Numbered(content, kind)
    counted = [(numbered.run(run), count) for run, count in runs.items()]
    single: list[str] = []
    if inside:
        single = missing_inside(content["model"], scripts) if kind == "fallback" else []
        numbered.learn(single)
        words = unknown_words(tokenizer, texts, scripts, content["model"])
        counted += [(numbered.word(word), count) for word, count in words.items()]
    taken = {*ids, *single, *(token["content"] for token in content["added_tokens"])}
    numbers, counts = [run for run, _ in counted], [count for _, count in counted]
    merges = learn_merges(numbers, counts, numbered.symbols, taken, max(0, size - len(single)), inside=inside)
    first = 1 + max([*ids.values(), *added])
    tokens = (*single, *(merge.text for merge in merges))
    extended = _with_merges(content, kind, merges, numbered.symbols, first, tokens)
    pieces = (*((unknown or 0,) for _ in single), *old_ids(merges, numbered))
    return Extended(json.dumps(extended, ensure_ascii=False), first, tokens, pieces, tuple(sorted(scripts)))


def scripts_to_learn(
    tokenizer: Tokenizer, texts: Sequence[str], bytes_by_id: Mapping[int, int], unknown: int | None = None
) -> frozenset[str]:
    """Returns the scripts that a tokenizer splits into too many tokens in the first texts; see `to_learn`.

    Args:
        unknown: the id of whole words that have no tokens.
    """
    letters: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    for batch in grouped_from(texts, len, LOOKED_AT):
        for text, encoding in zip(batch, tokenizer.encode_batch(batch, add_special_tokens=False), strict=True):
            letters.update(map(script_of, text))
            # A token belongs to the last character that it has a part of: the first may be a space.
            places = _places(encoding, bytes_by_id)
            tokens.update(script_of(text[end - 1]) for _, end in places.tolist() if end)
            lost = places[np.array(encoding.ids) == unknown] if unknown is not None else places[:0]
            tokens.update(script_of(character) for start, end in lost.tolist() for character in text[start : end - 1])
        break
    del letters[""]
    return to_learn(letters, tokens)


def _places(encoding: Encoding, bytes_by_id: Mapping[int, int]) -> np.ndarray:
    """Returns the start and end of each token in the text, shape (ids, 2).

    A Unigram tokenizer gives each byte of several unknown characters the span of all of them.
    """
    places = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
    wide = places[:, 1] - places[:, 0] > 1
    if not bytes_by_id or not wide.any():
        return places
    bounds = [0, *(np.flatnonzero((places[1:] != places[:-1]).any(axis=1)) + 1).tolist(), len(places)]
    for first, last in pairwise(bounds):
        found = [bytes_by_id.get(number) for number in encoding.ids[first:last]] if wide[first] else [None]
        written = bytes(byte for byte in found if byte is not None)
        characters = written.decode(errors="ignore")
        start, end = places[first].tolist()
        if len(written) == len(found) and len(characters) == end - start:  # else its normalizer changed them
            lengths = [len(character.encode()) for character in characters]
            places[first:last, 0] = start + np.repeat(np.arange(end - start), lengths)
            places[first:last, 1] = places[first:last, 0] + 1
    return places


def _counted_runs(
    tokenizer: Tokenizer,
    texts: Iterable[str],
    scripts: frozenset[str],
    added: frozenset[int],
    bytes_by_id: Mapping[int, int],
) -> Counter[bytes]:
    """Counts each run of token ids (as the bytes of an int64 array) in the texts.

    A run is within a word, and all of its tokens consist of letters of the scripts; it may begin with a space.
    """
    counted: Counter[bytes] = Counter()
    for batch in grouped_from(texts, len, AT_ONCE):
        for text, encoding in zip(batch, tokenizer.encode_batch(batch, add_special_tokens=False), strict=True):
            counted.update(_runs(text, encoding, _places(encoding, bytes_by_id), scripts, added))
    return counted


def _runs(
    text: str, encoding: Encoding, places: np.ndarray, scripts: frozenset[str], added: frozenset[int]
) -> Iterator[bytes]:
    ids = np.array(encoding.ids, dtype=np.int64)
    if not len(ids):
        return
    words = np.array(encoding.word_ids, dtype=np.float64)  # NaN for tokens of no word
    codes = codes_of(text)
    inside = are_letters(codes, scripts)
    space = codes == ord(" ")
    inside[:-1] |= space[:-1] & inside[1:]
    outside_before = np.concatenate(([0], np.cumsum(~inside)))
    start, end = places[:, 0], np.maximum(places[:, 1], places[:, 0] + 1)
    usable = outside_before[np.minimum(end, len(codes))] == outside_before[start]
    if added:
        usable &= ~np.isin(ids, list(added))
    begins = ~usable | (words != np.roll(words, 1)) | space[start]
    begins[1:] |= ~usable[:-1]
    begins[0] = True
    bounds = [*np.flatnonzero(begins).tolist(), len(ids)]
    for first, last in pairwise(bounds):
        if usable[first]:
            yield ids[first:last].tobytes()


def _with_merges(
    content: dict[str, Any],
    kind: Kind,
    merges: Sequence[Merge],
    symbols: Sequence[Symbol],
    first: int,
    texts: Sequence[str],
) -> dict[str, Any]:
    """Returns the definition with new tokens from id ``first`` on, those of the merges last."""
    model = dict(content["model"])
    if model["type"] == "Unigram":
        model["vocab"] = _pieces_of_unigram(content, texts, first)
        return {**content, "model": model}
    # Added tokens keep their ids only if the model has them too: others are numbered after the vocabulary.
    vocabulary = ids_of(content) | {token["content"]: token["id"] for token in content["added_tokens"]}
    vocabulary |= {text: first + i for i, text in enumerate(texts)}
    model["vocab"] = vocabulary
    if model["type"] == "WordPiece":  # pieces are all it has
        return {**content, "model": model}
    if kind == "fallback":
        new = [pair for text in texts for pair in _all_cuts(text, vocabulary)]
    else:
        names = [*(symbol.text for symbol in symbols), *texts]
        new = [(names[merge.left], names[merge.right]) for merge in merges if merge.right is not None]
    model["merges"] = [*model["merges"], *(list(pair) for pair in new)]
    return {**content, "model": model}


def _all_cuts(text: str, vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """Returns every pair of tokens that concatenate to a token: sentencepiece allows any merge that gives a piece."""
    cuts = [(text[:i], text[i:]) for i in range(1, len(text))]
    known = [cut for cut in cuts if cut[0] in vocabulary and cut[1] in vocabulary]
    return sorted(known, key=lambda cut: (vocabulary[cut[0]], vocabulary[cut[1]]))


def _pieces_of_unigram(content: dict[str, Any], texts: Sequence[str], first: int) -> list[list[Any]]:
    """Adds new pieces with one score below all old ones: of two segmentations, the one with fewer new pieces wins."""
    pieces: list[list[Any]] = [list(piece) for piece in content["model"]["vocab"]]
    lowest = min(score for _, score in pieces) + LAST_RESORT
    added = {token["id"]: token["content"] for token in content["added_tokens"]}
    pieces += [[added[number], lowest] for number in range(len(pieces), first)]
    return [*pieces, *([text, lowest] for text in texts)]
