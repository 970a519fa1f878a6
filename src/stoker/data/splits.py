"""Splits by file names, as on the hub, and slices of rows: train, [:1000], validation[10%:]."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from stoker.data.files.byte_streams import MAGIC
from stoker.data.files.readers import SUFFIXES
from stoker.node_cache.remote_file import DataFile

File = TypeVar("File", bound=DataFile)

# Words for the three usual splits in file and folder names.
WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_SPLIT = re.compile(r"\s*([\w.-]+)?\s*(?:\[\s*(-?\d+%?)?\s*:\s*(-?\d+%?)?\s*\])?\s*")


@dataclass(frozen=True)
class Slice:
    """Rows from `start` to before `stop`, as Python counts, or in percent of all; empty for open ends."""

    start: str = ""
    stop: str = ""

    @property
    def needs_total(self) -> bool:
        """Returns whether the slice depends on the number of all rows."""
        return any(end.endswith("%") or end.startswith("-") for end in (self.start, self.stop))

    def bounds(self, total: int) -> tuple[int, int | None]:
        """Returns (first, end) of the rows among `total`; an end of None is the end of the rows.

        Percentages are rounded to the nearest row, so that ``[:p%]`` and ``[p%:]`` together are the whole.
        """
        start = _row(self.start, total) if self.start else 0
        return start, _row(self.stop, total) if self.stop else None

    def __str__(self) -> str:
        return f"[{self.start}:{self.stop}]" if self.start or self.stop else ""


ALL_ROWS = Slice()


def _row(end: str, total: int) -> int:
    row = round(int(end[:-1]) * total / 100) if end.endswith("%") else int(end)
    return max(0, row + total if end.startswith("-") else row)


def parse_split(text: str | None) -> tuple[str, Slice]:
    """Parses a split: its name, "" if there is none, and the slice.

    Raises:
        ValueError: `text` is neither.
    """
    match = _SPLIT.fullmatch(text or "")
    if match is None:
        raise ValueError(f"{text!r} is not a split")
    name, start, stop = (group or "" for group in match.groups())
    for end in (start, stop):
        if end.endswith("%") and abs(int(end[:-1])) > 100:
            raise ValueError(f"{end} of the rows in split {text!r}")
    return name, Slice(start, stop)


def choose(files: list[File], root: Path | str, split: str) -> list[File]:
    """Returns the files whose name, or a folder's under `root`, contains the split's name; all files without a split.

    Files that name no split are training data.
    """
    if not split:
        return files
    named = [file for file in files if _has(file, root, _words(split))]
    if named or split not in WORDS["train"]:
        return named
    every = tuple(word for words in WORDS.values() for word in words)
    return [file for file in files if not _has(file, root, every)]


def patterns(split: str) -> Iterator[list[str]]:
    """Patterns to request from the hub: the files that name the split, then all data files."""
    endings = [f"{suffix}{archive}" for suffix in SUFFIXES for archive in ("", *MAGIC)]
    yield [f"*{word}*{ending}" for word in _words(split or "train") for ending in endings]
    yield [f"*{ending}" for ending in endings]


def _words(split: str) -> tuple[str, ...]:
    return next((words for words in WORDS.values() if split in words), (split,))


def relative(file: DataFile, root: Path | str) -> str:
    """Returns the name of a file below a folder, or below a URL."""
    return file.relative_to(root).as_posix() if isinstance(file, Path) else str(file).removeprefix(f"{root}/")


def _has(file: DataFile, root: Path | str, words: tuple[str, ...]) -> bool:
    name = relative(file, root).lower()
    return any(re.search(rf"(?<![a-z0-9]){re.escape(word.lower())}(?![a-z0-9])", name) for word in words)
