"""A tokenised chunk of rows, in columns: processes exchange a few large arrays faster than many small ones."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from stoker.data.files.rows import Rejected

INDEX = np.dtype(
    [
        ("start", "<i8"),  # first token, counted within the batch or the shard
        ("length", "<i4"),
        ("trained", "<i4"),  # tokens with a loss: the first token of a sequence never has one
        ("row", "<i8"),
        ("file", "<i4"),
        ("digest", "<u8"),
        ("stops", "?"),
        ("lost", "<i4"),  # tokens that were cut off behind the last
        ("continues", "?"),
        ("exact", "?"),
        ("good", "?"),  # no label calls the answer bad
        ("margin", "<f4"),  # how much better the chosen answer of a pair is
    ]
)

Span = tuple[int, int]
"""(first, one past the last), in tokens or in characters."""


@dataclass
class EncodedBatch:
    """A tokenised chunk of rows.

    Attributes:
        rows_in: rows read.
        ids, trained: the tokens of all sequences end to end, shape (tokens,).
        index: one entry of `INDEX` a sequence.
        files: the file names that the index's ``file`` points into.
        dropped: the rows that give no sequence, in reading order.
        rows_cut, rows_split: rows that lost tokens, rows that became several sequences.
        ignored: fields with content that do not reach the text -> rows.
        turns_untrained: the assistant's turns whose weight is 0.
        longest: tokens of the longest row, dropped ones included.
        special_tokens: number of special tokens written in content.
    """

    rows_in: int = 0
    ids: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint32))
    trained: np.ndarray = field(default_factory=lambda: np.zeros(0, bool))
    index: np.ndarray = field(default_factory=lambda: np.zeros(0, INDEX))
    files: tuple[str, ...] = ()
    dropped: list[Rejected] = field(default_factory=list)
    rows_cut: int = 0
    rows_split: int = 0
    ignored: Counter[str] = field(default_factory=Counter)
    turns_untrained: int = 0
    longest: int = 0
    special_tokens: int = 0


class EncodedBatchBuilder:
    """Collects sequences into the arrays of an `EncodedBatch`."""

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._spans: list[Span] = []
        self._entries: list[tuple[int, int, int, int, int, int, bool, int, bool, bool, bool, float]] = []
        self._digests: list[int | None] = []  # None if the digest is that of the ids
        self._files: dict[str, int] = {}

    def add(
        self,
        ids: Sequence[int],
        spans: Sequence[Span],
        place: tuple[str, int],
        *,
        stops: bool,
        lost: int,
        continues: bool,
        exact: bool,
        good: bool = True,
        margin: float = 0.0,
        digest: int | None = None,
    ) -> None:
        """Adds a sequence: its ids, the spans of its trained tokens, and its (file, row).

        Args:
            digest: of its content, by default that of its ids. Pairs are held out by the exclusive or of their two
                digests, which is therefore the same for all pairs of a row.
        """
        start = len(self._ids)
        self._ids.extend(ids)
        trained = 0
        for first, last in spans:
            self._spans.append((start + first, start + last))
            trained += last - max(first, 1)
        file = self._files.setdefault(place[0], len(self._files))
        self._digests.append(digest)
        self._entries.append(
            (start, len(ids), trained, place[1], file, 0, stops, lost, continues, exact, good, margin),
        )

    def into(self, batch: EncodedBatch) -> None:
        """Sets the batch's arrays."""
        batch.ids = np.array(self._ids, dtype=np.uint32)
        batch.trained = np.zeros(len(self._ids), dtype=bool)
        for first, last in self._spans:
            batch.trained[first:last] = True
        batch.index = np.array(self._entries, dtype=INDEX)
        batch.files = tuple(self._files)
        content = batch.ids.tobytes()
        batch.index["digest"] = np.array(
            [
                _digest(content[4 * entry[0] : 4 * (entry[0] + entry[1])]) if given is None else given
                for entry, given in zip(self._entries, self._digests, strict=True)
            ],
            dtype=np.uint64,
        )


def digest_of(sequences: Sequence[Sequence[int]]) -> int:
    """Returns a digest of token ids."""
    return _digest(b"".join(np.array(ids, dtype=np.uint32).tobytes() for ids in sequences))


def _digest(content: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")
