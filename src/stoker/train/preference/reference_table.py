"""Log-probabilities under a reference model, cached on disk by the content of model and row."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from filelock import FileLock

from stoker.data.sequences import Document
from stoker.data.token_cache import Row
from stoker.hardware.cache_folder import cache_folder

ENTRY = np.dtype([("row", "<u8"), ("log_probability", "<f8")])


def row_key(row: Row) -> int:
    """Digests a row's tokens and its loss mask."""
    digest = hashlib.blake2b(np.ascontiguousarray(row.ids, "<u4").tobytes(), digest_size=8)
    digest.update(np.packbits(row.trained).tobytes())
    return int.from_bytes(digest.digest(), "little")


class ReferenceTable:
    """Summed log-probabilities of the trained tokens of rows, under one model."""

    def __init__(self, entries: np.ndarray | None = None) -> None:
        self._entries = np.zeros(0, ENTRY) if entries is None else entries

    @classmethod
    def read(cls, model: str) -> ReferenceTable:
        """Reads a model's values from disk; empty if nothing can be read.

        Args:
            model: digest of the model's content.
        """
        try:
            entries = np.load(_file(model), allow_pickle=False)
        except (OSError, ValueError, EOFError):
            return cls()
        return cls(entries if entries.dtype == ENTRY and entries.ndim == 1 else None)

    def write(self, model: str) -> None:
        """Merges these entries into those on disk."""
        file = _file(model)
        file.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{file}.lock"):
            both = ReferenceTable.read(model)
            both.add(self._entries["row"], self._entries["log_probability"])
            fresh = file.with_suffix(".tmp")
            with fresh.open("wb") as stream:
                np.save(stream, both._entries)
            fresh.replace(file)

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def entries(self) -> np.ndarray:
        """Entries sorted by row."""
        return self._entries

    def add(self, keys: Sequence[int] | np.ndarray, log_probabilities: np.ndarray) -> None:
        """Adds rows; existing rows keep their values."""
        new = np.zeros(len(keys), ENTRY)
        new["row"], new["log_probability"] = keys, log_probabilities
        entries = np.concatenate([self._entries, new])
        _, first = np.unique(entries["row"], return_index=True)
        self._entries = entries[first]

    def missing(self, documents: Sequence[Document]) -> list[Document]:
        """Returns the documents without a value, each content once."""
        known = set(self._entries["row"].tolist())
        found: dict[int, Document] = {}
        for document in documents:
            key = row_key(document.row)
            if key not in known:
                found.setdefault(key, document)
        return list(found.values())

    def of(self, documents: Sequence[Document]) -> np.ndarray:
        """Returns the values of documents, float64.

        Raises:
            KeyError: a document has none.
        """
        keys = np.array([row_key(document.row) for document in documents], np.uint64)
        places = np.searchsorted(self._entries["row"], keys)
        found = self._entries[np.minimum(places, max(0, len(self) - 1))] if len(self) else np.zeros(len(keys), ENTRY)
        if not len(self) or (found["row"] != keys).any():
            raise KeyError("a row has no log-probability under the reference model")
        return found["log_probability"].copy()


def _file(model: str) -> Path:
    return cache_folder() / "reference" / f"{model}.npy"
