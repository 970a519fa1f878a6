"""A tokenizer with new tokens behind its old ones, learnt from texts on top of its own encoding.

The texts are encoded as they always were, and new merges are learnt over the tokens that come out, within the words
that the tokenizer itself cuts. They rank behind all old merges and make new tokens only, so old merges do what they
did before any new one is looked at. New tokens hold letters of the learnt scripts alone (and the space before them):
a text without such letters gets the ids that it always got.
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

from stoker.data.merges import Merge, Symbol, learn_merges
from stoker.data.scripts import Letters, codes_of, script_of, to_learn
from stoker.data.token_bytes import Kind, byte_of, bytes_of, ids_of, kind_of
from stoker.errors import Problem, UserError

LOOKED_AT = 1 << 21  # characters from which the scripts are found
AT_ONCE = 1 << 20  # characters encoded at a time
LAST_RESORT = -1.0  # how far below all old scores those of new Unigram pieces lie


@dataclass(frozen=True)
class Extended:
    """A tokenizer with new tokens.

    Attributes:
        definition: the content of its ``tokenizer.json``.
        first: the first new id; all ids below are what they were.
        tokens: the new tokens, in the order of their ids.
        pieces: of each new token, the ids that it was cut into before.
        scripts: whose letters new tokens hold.
    """

    definition: str
    first: int
    tokens: tuple[str, ...]
    pieces: tuple[tuple[int, ...], ...]
    scripts: tuple[str, ...]


def refusal(definition: dict[str, Any]) -> str | None:
    """Why a tokenizer, given as the content of its ``tokenizer.json``, cannot be extended; None where it can."""
    model = definition["model"]
    if model.get("type") not in ("BPE", "Unigram"):
        return f"it is a {model.get('type')} tokenizer, and only BPE and Unigram ones can take new merges"
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        return "it marks tokens by their place in a word, so a merge of two is not their texts together"
    if kind_of(definition) is None:
        return "it has no token for every byte: characters that it does not know are lost before they could be learnt"
    if model["type"] == "Unigram" and kind_of(definition) == "byte-level":
        return "it is a Unigram tokenizer over bytes, of which no library writes another"
    return None


def extend(definition: str, texts: Sequence[str], size: int) -> Extended:
    """Adds up to ``size`` tokens; fewer where no more pairs of tokens stand twice in the texts.

    Raises:
        UserError: this kind of tokenizer cannot be extended, or the texts hold no letters.
    """
    content = json.loads(definition)
    why = refusal(content)
    if why:
        raise UserError(Problem(f"the tokenizer cannot be extended: {why}"))
    kind = kind_of(content)
    assert kind is not None
    tokenizer = Tokenizer.from_str(json.dumps({**content, "post_processor": None}))  # it would trim spaces off offsets
    tokenizer.no_truncation()
    tokenizer.no_padding()
    ids = ids_of(content)
    found = {number: byte_of(token) for token, number in ids.items() if kind == "fallback"}
    bytes_by_id = {number: byte for number, byte in found.items() if byte is not None}
    scripts = scripts_to_learn(tokenizer, texts, bytes_by_id)
    if not scripts:
        raise UserError(Problem("the corpus holds no letters", "give texts of the language that is to be learnt"))
    added = frozenset(token["id"] for token in content["added_tokens"])
    runs = _counted_runs(tokenizer, texts, Letters(scripts), added, bytes_by_id)
    numbered = _Numbered(content, kind)
    numbers = [numbered.run(run) for run in runs]
    taken = set(ids) | {token["content"] for token in content["added_tokens"]}
    merges = learn_merges(numbers, list(runs.values()), numbered.symbols, taken, size)
    first = 1 + max([*ids.values(), *added])
    extended = _with_merges(content, kind, merges, numbered.symbols, first)
    return Extended(
        json.dumps(extended, ensure_ascii=False),
        first,
        tuple(merge.text for merge in merges),
        tuple(_pieces(merges, numbered)),
        tuple(sorted(scripts)),
    )


def scripts_to_learn(tokenizer: Tokenizer, texts: Sequence[str], bytes_by_id: Mapping[int, int]) -> frozenset[str]:
    """The scripts that a tokenizer cuts poorly, as the first texts show; see `to_learn`."""
    letters: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    for batch in _batches(texts, LOOKED_AT):
        for text, encoding in zip(batch, tokenizer.encode_batch(batch, add_special_tokens=False), strict=True):
            letters.update(map(script_of, text))
            # A token belongs to the last character that it has a part of: the first may be a space.
            tokens.update(script_of(text[end - 1]) for _, end in _places(encoding, bytes_by_id).tolist() if end)
        break
    del letters[""]
    return to_learn(letters, tokens)


def _batches(texts: Iterable[str], characters: int) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= characters:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _places(encoding: Encoding, bytes_by_id: Mapping[int, int]) -> np.ndarray:
    """Where each token begins and ends in the text, shape (ids, 2).

    A Unigram tokenizer gives every byte of several unknown characters the place of them all.
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
        if len(written) == len(found) and len(characters) == end - start:  # else its normalizer writes others
            lengths = [len(character.encode()) for character in characters]
            places[first:last, 0] = start + np.repeat(np.arange(end - start), lengths)
            places[first:last, 1] = places[first:last, 0] + 1
    return places


def _counted_runs(
    tokenizer: Tokenizer,
    texts: Iterable[str],
    letters: Letters,
    added: frozenset[int],
    bytes_by_id: Mapping[int, int],
) -> Counter[bytes]:
    """How often each run of token ids (as the bytes of an int64 array) stands in the texts.

    A run is within a word, and all of its tokens lie within letters of the scripts; it may begin with a space.
    """
    counted: Counter[bytes] = Counter()
    for batch in _batches(texts, AT_ONCE):
        for text, encoding in zip(batch, tokenizer.encode_batch(batch, add_special_tokens=False), strict=True):
            counted.update(_runs(text, encoding, _places(encoding, bytes_by_id), letters, added))
    return counted


def _runs(
    text: str, encoding: Encoding, places: np.ndarray, letters: Letters, added: frozenset[int]
) -> Iterator[bytes]:
    ids = np.array(encoding.ids, dtype=np.int64)
    if not len(ids):
        return
    words = np.array(encoding.word_ids, dtype=np.float64)  # NaN for tokens of no word
    codes = codes_of(text)
    inside = letters.among(codes)
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


class _Numbered:
    """Tokens of runs as symbols, numbered as they come; characters written in bytes as symbols of their own."""

    def __init__(self, content: dict[str, Any], kind: Kind) -> None:
        self._kind = kind
        self._texts = {number: token for token, number in ids_of(content).items()}
        self._numbers: dict[int | str, int] = {}
        self._ids = ids_of(content)
        self.symbols: list[Symbol] = []
        self.pieces: list[tuple[int, ...]] = []
        """Of each symbol the old ids that it consists of."""

    def run(self, run: bytes) -> list[int]:
        """The symbols of a run."""
        numbers: list[int] = []
        waiting = b""
        for token_id in np.frombuffer(run, dtype=np.int64).tolist():
            number = self._numbers.get(token_id)
            if number is not None:
                numbers.append(number)
                continue
            byte = byte_of(self._texts[token_id]) if self._kind == "fallback" else None
            if byte is None:
                numbers.append(self._token(token_id))
                continue
            waiting += bytes((byte,))
            try:
                character = waiting.decode()
            except UnicodeDecodeError:
                continue
            numbers.append(self._character(character))
            waiting = b""
        return numbers

    def _token(self, token_id: int) -> int:
        text = self._texts[token_id]
        content = bytes_of(text, self._kind)
        starts = [i for i, byte in enumerate(content) if byte & 0xC0 != 0x80]
        inherited = starts[0] if starts else len(content)
        missing = _length(content[starts[-1]]) - (len(content) - starts[-1]) if starts else 0
        return self._add(token_id, Symbol(text, len(starts), inherited, missing), (token_id,))

    def _character(self, character: str) -> int:
        number = self._numbers.get(character)
        if number is not None:
            return number
        cut = tuple(self._ids[f"<0x{byte:02X}>"] for byte in character.encode())
        return self._add(character, Symbol(character, unknown=True), cut)

    def _add(self, key: int | str, symbol: Symbol, cut: tuple[int, ...]) -> int:
        self._numbers[key] = len(self.symbols)
        self.symbols.append(symbol)
        self.pieces.append(cut)
        return self._numbers[key]


def _length(lead: int) -> int:
    """Bytes of the character in UTF-8 that this byte begins."""
    return 1 if lead < 0x80 else 2 if lead < 0xE0 else 3 if lead < 0xF0 else 4


def _pieces(merges: Sequence[Merge], numbered: _Numbered) -> Iterator[tuple[int, ...]]:
    cuts = list(numbered.pieces)
    for merge in merges:
        cuts.append(cuts[merge.left] + (cuts[merge.right] if merge.right is not None else ()))
        yield cuts[-1]


def _with_merges(
    content: dict[str, Any], kind: Kind, merges: Sequence[Merge], symbols: Sequence[Symbol], first: int
) -> dict[str, Any]:
    """The definition with the tokens of the merges from id ``first`` on."""
    model = dict(content["model"])
    texts = [merge.text for merge in merges]
    if model["type"] == "Unigram":
        model["vocab"] = _pieces_of_unigram(content, texts, first)
        return {**content, "model": model}
    # Added tokens keep their ids only where the model has them too: others are numbered behind the vocabulary.
    vocabulary = ids_of(content) | {token["content"]: token["id"] for token in content["added_tokens"]}
    vocabulary |= {text: first + i for i, text in enumerate(texts)}
    model["vocab"] = vocabulary
    if kind == "fallback":
        new = [pair for text in texts for pair in _all_cuts(text, vocabulary)]
    else:
        names = [*(symbol.text for symbol in symbols), *texts]
        new = [(names[merge.left], names[merge.right]) for merge in merges if merge.right is not None]
    model["merges"] = [*model["merges"], *(list(pair) for pair in new)]
    return {**content, "model": model}


def _all_cuts(text: str, vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """Every pair of tokens that make a token: sentencepiece merges what gives a piece, whichever way it was learnt."""
    cuts = [(text[:i], text[i:]) for i in range(1, len(text))]
    known = [cut for cut in cuts if cut[0] in vocabulary and cut[1] in vocabulary]
    return sorted(known, key=lambda cut: (vocabulary[cut[0]], vocabulary[cut[1]]))


def _pieces_of_unigram(content: dict[str, Any], texts: Sequence[str], first: int) -> list[list[Any]]:
    """The pieces with new ones whose scores lie below all old ones, alike: of two cuts the shorter one wins."""
    pieces: list[list[Any]] = [list(piece) for piece in content["model"]["vocab"]]
    lowest = min(score for _, score in pieces) + LAST_RESORT
    added = {token["id"]: token["content"] for token in content["added_tokens"]}
    pieces += [[added[number], lowest] for number in range(len(pieces), first)]
    return [*pieces, *([text, lowest] for text in texts)]
