"""Reads the rows of a click log's sources, as {column: value}, ordered by file name and line."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from datetime import date
from decimal import Decimal
from itertools import islice
from typing import Any

from stoker.data.files.byte_streams import LINE_TOO_LONG, LONGEST_LINE, ByteStream
from stoker.data.files.readers import PARQUET, TABLES, data_suffix, decode, read_rows
from stoker.data.files.rows import Raw, Rejected
from stoker.data.files.tables import NOT_UTF8
from stoker.data.ranking.line_formats import PARSERS, BadLineError, line_format_of
from stoker.data.sources import Source
from stoker.errors import Problem, UserError
from stoker.node_cache.remote_file import DataFile

_DIGITS = re.compile(r"(\d+)")
_WHOLE = (*PARQUET, ".json", ".jsonl", ".ndjson", ".csv")  # suffixes that determine the format


def in_order(files: tuple[DataFile, ...]) -> tuple[DataFile, ...]:
    """Sorts the files of a stream by name, numbers by their value: ``day_2`` before ``day_10``."""
    return tuple(
        sorted(files, key=lambda path: [(int(p), "") if p.isdecimal() else (-1, p) for p in _DIGITS.split(str(path))])
    )


def ordered_files(source: Source) -> list[tuple[DataFile, str, str]]:
    """Returns path, name and fingerprint of each file, in the order of reading."""
    ordered = replace(source, files=in_order(source.files))
    return [(path, *named) for path, named in zip(ordered.files, ordered.contents().items(), strict=True)]


def log_rows(source: Source, form: str) -> Iterator[Raw | Rejected]:
    """Yields the rows of a source, broken ones in their place; each value is a dict.

    Args:
        form: ``criteo``, ``libsvm``, ``libffm``; auto finds these from a file's first line, and takes the suffix
            otherwise.

    Raises:
        UserError: a file as a whole cannot be read.
    """
    total = sum(1 for _ in _all_rows(source, form)) if source.part.needs_total else 0
    start, stop = source.part.bounds(total)
    yield from islice(_all_rows(source, form), start, stop)


def _all_rows(source: Source, form: str) -> Iterator[Raw | Rejected]:
    if source.corpus:
        yield from (_decoded(raw) for raw in source.all_rows())
        return
    for path in in_order(source.files):
        yield from file_rows(path, form)


def file_rows(path: DataFile, form: str) -> Iterator[Raw | Rejected]:
    """Yields the rows of one file; see `log_rows`."""
    kind = line_form(path, form)
    if kind is None:
        if data_suffix(path) in (".txt", ".md", ""):
            hint = "write `format: criteo`, libsvm or libffm beside its `path`, or give the file the right suffix"
            raise UserError(
                Problem("its first line is not a row of criteo, libsvm or libffm", hint, file=str(path), line=1)
            )
        rows = (_decoded(raw) for raw in read_rows(path))
        yield from map(_as_in_json, rows) if data_suffix(path) in PARQUET else rows
        return
    try:
        with ByteStream(path) as stream:
            for number, line in stream.lines():
                if line.strip():
                    yield _parsed(str(path), number, line, kind)
            if stream.damage:
                yield Rejected(str(path), stream.line + 1, stream.damage)
    except OSError as error:
        raise UserError(Problem(f"cannot be read: {error.strerror or error}", file=str(path))) from error


def line_form(path: DataFile, form: str) -> str | None:
    """Returns which of the formats without a header a file has, stated or found; None for another format."""
    return form if form in PARSERS else _kind_of(path)


def _kind_of(path: DataFile) -> str | None:
    suffix = data_suffix(path)
    if suffix in _WHOLE:
        return None
    with ByteStream(path) as stream:
        first = next((line for _, line in stream.lines() if line.strip()), b"")
    found = line_format_of(first.decode("utf-8", "replace"))
    return None if suffix in TABLES and found != "criteo" else found


def _parsed(source: str, number: int, line: bytes, kind: str) -> Raw | Rejected:
    if len(line) > LONGEST_LINE:
        return Rejected(source, number, LINE_TOO_LONG)
    try:
        return Raw(source, number, PARSERS[kind](line.decode("utf-8")))
    except UnicodeDecodeError:
        return Rejected(source, number, NOT_UTF8)
    except BadLineError as error:
        return Rejected(source, number, str(error))


def _as_in_json(raw: Raw | Rejected) -> Raw | Rejected:
    return Raw(raw.source, raw.row, _json_value(raw.value)) if isinstance(raw, Raw) else raw


def _json_value(value: Any) -> Any:
    """Returns a value of Parquet as JSON has it: bytes as text, dates and timestamps as ISO 8601 writes them.

    A decimal is an integer if it is whole, and a float otherwise.
    """
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, date):
        return value.isoformat()
    if isinstance(value, dict):
        return {name: _json_value(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_json_value(item) for item in value)
    return value


def _decoded(raw: Raw | Rejected) -> Raw | Rejected:
    if isinstance(raw, Rejected):
        return raw
    value: Any = decode(raw)
    return value if isinstance(value, Rejected) else Raw(raw.source, raw.row, value)
