"""Text into token ids, exactly as the tokenizer says, with each word looked at once.

Byte-level BPE tokenizers part a text into words by a pattern and merge inside of each word alone. So the
tokens of a text are those of its words, and a word seen before need not be merged again: a dictionary answers
several times faster than the pattern and the merges. A tokenizer of another build, or a text outside of what
the reasoning below covers, goes through the tokenizer as a whole.

Where a text may be cut: between a character that is no white space and a space that such a one follows. In
all of `PATTERNS` white space begins a word or is one; what follows only decides how several are parted.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Sequence
from functools import cached_property

from tokenizers import Encoding, Tokenizer

from stoker.data.word_tokenizers import cuts_at_words

REMEMBERED = 1 << 18  # words: about 60 MB
LONGEST_WORD = 256  # characters; longer ones hardly come again
CHECKED = 64  # texts of each process that are also encoded as a whole
LONGEST_CHECKED = 1 << 15  # characters; a longer one would take seconds

_CUT = re.compile(r"(?<=\S)(?= \S)")
Encoded = tuple[list[int], list[tuple[int, bool]]]
"""The ids of a text and, of each place, (tokens that begin before it, whether one reaches over it)."""


class _HardlyWords(Exception):
    """A text with so few spaces that its words will not come again."""


class Encoder:
    """Encodes with a ``tokenizer.json``. One of them serves one process."""

    def __init__(self, definition: str) -> None:
        self._definition = definition
        content = json.loads(definition)
        # Post-processors of byte-level tokenizers trim the white space off the offsets; places need it.
        self._bare = Tokenizer.from_str(json.dumps({**content, "post_processor": None}))
        self._bare.no_truncation()
        self._bare.no_padding()
        added = content.get("added_tokens") or []
        self._special = {token["content"]: int(token["id"]) for token in added}
        longest_first = sorted(map(re.escape, self._special), key=len, reverse=True)
        self._split = re.compile(f"({'|'.join(longest_first)})").split if longest_first else None
        self.remembers = cuts_at_words(content)
        self._composes = content.get("normalizer") is not None
        self._unchecked = CHECKED
        self._holes = 0  # words met that were not known
        self._after_space: dict[str, list[int]] = {}
        self._whole: dict[str, list[int]] = {}
        self._places: dict[tuple[str, int], tuple[int, bool]] = {}

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer as it is, without truncation and padding."""
        tokenizer = Tokenizer.from_str(self._definition)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer

    @cached_property
    def _around(self) -> tuple[list[int], list[int]] | None:
        return _added_around(self.tokenizer)

    def encode_document(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of documents, with the tokens that the tokenizer puts around one (such as ``<s>``)."""
        if not texts:
            return []
        if self._around is None:
            return [e.ids for e in self.tokenizer.encode_batch_fast(list(texts), add_special_tokens=True)]
        before, after = self._around
        return [[*before, *ids, *after] for ids, _ in self.encode(texts, [()] * len(texts))]

    def encode(self, texts: Sequence[str], places: Sequence[Sequence[int]]) -> list[Encoded]:
        """The ids of texts, nothing added, and where places of each (in characters, rising) fall."""
        found: list[Encoded | None] = [None] * len(texts)
        if self.remembers:
            again = []
            missing: dict[str, None] = {}
            for i, text in enumerate(texts):
                if self._composes and not unicodedata.is_normalized("NFC", text):
                    continue
                try:
                    found[i] = self._from_words(text, places[i], missing)
                except _HardlyWords:
                    continue
                if found[i] is None:
                    again.append(i)
            self._learn(missing)
            for i in again:
                found[i] = self._from_words(texts[i], places[i], {})
            if self._unchecked > 0:
                self._check(texts, places, found)
        rest = [i for i, encoded in enumerate(found) if encoded is None]
        for i, encoded in zip(rest, self._as_a_whole([texts[i] for i in rest], places, rest), strict=True):
            found[i] = encoded
        return [encoded for encoded in found if encoded is not None]

    def encode_whole(self, text: str) -> list[int]:
        """The ids of one text, nothing added, by the tokenizer itself."""
        return self._bare.encode(text, add_special_tokens=False).ids

    def _as_a_whole(self, texts: list[str], places: Sequence[Sequence[int]], numbers: Sequence[int]) -> list[Encoded]:
        if not texts:
            return []
        if not any(places[i] for i in numbers):  # without offsets, encoding is faster
            return [(e.ids, []) for e in self._bare.encode_batch_fast(texts, add_special_tokens=False)]
        encodings = self._bare.encode_batch(texts, add_special_tokens=False)
        return [
            (e.ids, [find_place(e, place, len(text)) for place in places[i]])
            for e, text, i in zip(encodings, texts, numbers, strict=True)
        ]

    def _check(self, texts: Sequence[str], places: Sequence[Sequence[int]], found: list[Encoded | None]) -> None:
        """Compares the first texts with the tokenizer; where they differ, words are not trusted any more."""
        seen = [i for i, e in enumerate(found) if e is not None and len(texts[i]) <= LONGEST_CHECKED]
        seen = seen[: self._unchecked]
        self._unchecked -= len(seen)
        if [found[i] for i in seen] != self._as_a_whole([texts[i] for i in seen], places, seen):
            self.remembers = False
            found[:] = [None] * len(found)

    def _from_words(self, text: str, places: Sequence[int], missing: dict[str, None]) -> Encoded | None:
        """The ids of a text out of its words'; None, and the words that are not known, where some are not."""
        ids: list[int] = []
        at: list[tuple[int, bool]] = []
        holes = self._holes
        segments = self._split(text) if self._split else [text]
        begin, asked = 0, 0  # characters before this segment, places found
        for number, segment in enumerate(segments):
            end = begin + len(segment)
            while asked < len(places) and places[asked] <= begin:
                at.append((len(ids), False))
                asked += 1
            if number % 2:
                ids.append(self._special[segment])
                while asked < len(places) and places[asked] < end:  # inside of a special token
                    at.append((len(ids), True))
                    asked += 1
            elif segment:
                inside: list[int] = []
                while asked < len(places) and places[asked] < end:
                    inside.append(places[asked] - begin)
                    asked += 1
                self._segment(segment, inside, ids, at, missing)
            begin = end
        at.extend([(len(ids), False)] * (len(places) - asked))
        return (ids, at) if self._holes == holes else None

    def _segment(
        self,
        segment: str,
        inside: list[int],
        ids: list[int],
        at: list[tuple[int, bool]],
        missing: dict[str, None],
    ) -> None:
        """Text between special tokens: most of it is words known behind one space each."""
        first, *words = segment.split(" ")
        if words and first and first[-1].isspace():
            return self._cut_segment(segment, inside, ids, at, missing)
        begun = self._whole.get(first) if first else []
        parts = [self._after_space.get(word) for word in words]
        if begun is None or None in parts:
            new = [word for word, part in zip(words, parts, strict=True) if part is None]
            if any(not word or word[0].isspace() or word[-1].isspace() for word in new):
                return self._cut_segment(segment, inside, ids, at, missing)
            self._miss([*([first] if begun is None else []), *(f" {word}" for word in new)], missing)
            return None
        for place in inside:
            spaces = segment.count(" ", 0, place)
            begin = segment.rfind(" ", 0, place) if spaces else 0
            word = f" {words[spaces - 1]}" if spaces else first
            before = len(ids) + (len(begun) + sum(map(len, parts[: spaces - 1])) if spaces else 0)  # type: ignore[arg-type]
            within, over = self._place_in(word, place - begin)
            at.append((before + within, over))
        ids.extend(begun)
        for part in parts:
            ids.extend(part)  # type: ignore[arg-type]
        return None

    def _miss(self, words: list[str], missing: dict[str, None]) -> None:
        """Notes words that are not known, so that the text is looked at again when they are."""
        if any(len(word) > LONGEST_WORD for word in words):
            raise _HardlyWords
        missing.update(dict.fromkeys(words))
        self._holes += 1

    def _cut_segment(
        self,
        segment: str,
        inside: list[int],
        ids: list[int],
        at: list[tuple[int, bool]],
        missing: dict[str, None],
    ) -> None:
        """The general case: white space of every kind, and places to be found."""
        begin = asked = 0
        for word in _CUT.split(segment):
            part = self._after_space.get(word[1:]) if word[0] == " " else None
            if part is None:
                part = self._whole.get(word)
            if part is None:
                if word not in missing:
                    self._miss([word], missing)
                self._holes += 1
                part = []
            while asked < len(inside) and inside[asked] < begin + len(word):
                before, over = self._place_in(word, inside[asked] - begin)
                at.append((len(ids) + before, over))
                asked += 1
            ids.extend(part)
            begin += len(word)

    def _place_in(self, word: str, place: int) -> tuple[int, bool]:
        if place == 0:
            return 0, False
        found = self._places.get((word, place))
        if found is None:
            encoding = self._bare.encode(word, add_special_tokens=False)
            found = find_place(encoding, place, len(word))
            if len(self._places) >= REMEMBERED:
                self._places.clear()
            self._places[word, place] = found
        return found

    def _learn(self, words: dict[str, None]) -> None:
        """Encodes words that were not known."""
        if not words:
            return
        if len(self._whole) + len(self._after_space) > REMEMBERED:
            self._whole.clear()
            self._after_space.clear()
        new = list(words)
        for word, encoding in zip(new, self._bare.encode_batch_fast(new, add_special_tokens=False), strict=True):
            self._whole[word] = encoding.ids
            inner = word[1:]
            if word[0] == " " and inner and " " not in inner and not (inner[0].isspace() or inner[-1].isspace()):
                self._after_space[inner] = encoding.ids


def find_place(encoding: Encoding, place: int, length: int) -> tuple[int, bool]:
    """Of a place in an encoded text: (tokens that begin before it, whether one of them reaches over it)."""
    at = place
    while at < length:
        token = encoding.char_to_token(at)
        if token is None:  # a character that no token stands for
            at += 1
            continue
        first = token
        while token < len(encoding) and _begin(encoding, token) < place:
            token += 1
        return token, token > first
    return len(encoding), False


def _begin(encoding: Encoding, token: int) -> int:
    span: tuple[int, int] | None = encoding.token_to_chars(token)
    assert span is not None, "an encoding without added tokens stands for text throughout"
    return span[0]


def _added_around(tokenizer: Tokenizer) -> tuple[list[int], list[int]] | None:
    """What the tokenizer puts before and behind a text; None where that hangs on the text."""
    bare = tokenizer.encode("a", add_special_tokens=False).ids
    whole = tokenizer.encode("a", add_special_tokens=True).ids
    for i in range(len(whole) - len(bare) + 1):
        if whole[i : i + len(bare)] == bare:
            return whole[:i], whole[i + len(bare) :]
    return None
