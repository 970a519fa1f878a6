"""Reads the lines of a JSON Lines file in batches, in memory that does not depend on the length of a line."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cache
from typing import IO

LONGEST = 4 << 20  # bytes of a line; the longest have the answers to a run's held-out prompts
PIECE = 128 << 10  # bytes that are read at a time; larger pieces leave the caches of a processor


def line_batches(file: IO[bytes], *, unfinished: bool = False) -> Iterator[tuple[list[bytes], int]]:
    """Yields the lines from the file's position on, each batch with the offset of the next line.

    A line longer than `LONGEST` is skipped, and its file named once. The offset may lie within such a line if its end
    has not been written yet.

    Args:
        unfinished: whether the last line counts without its newline.
    """
    begun = bytearray()  # of the line whose end has not been read; one byte more than `LONGEST` if it is too long
    while piece := file.read(PIECE):
        *lines, rest = piece.split(b"\n")
        if lines:
            lines[0] = bytes(begun + lines[0])
            begun.clear()
            yield [line for line in lines if _fits(line, file)], file.tell() - len(rest)
        begun += rest[: LONGEST + 1 - len(begun)]
        if not _fits(begun, file):
            yield [], file.tell()
    if unfinished and begun and _fits(begun, file):
        yield [bytes(begun)], file.tell()


def _fits(line: bytes | bytearray, file: IO[bytes]) -> bool:
    if len(line) > LONGEST:
        _name_once(str(file.name))
    return len(line) <= LONGEST


@cache
def _name_once(path: str) -> None:
    print(f"{path}: lines longer than {LONGEST >> 20} MiB are skipped", file=sys.stderr, flush=True)
