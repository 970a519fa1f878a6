"""Reads files row by row, in constant memory, and continues after broken rows.

`read_rows` runs in the main process and does little: it yields the bytes of each JSON line. `decode` turns them into
values, in the worker processes. One row is:

- JSON lines (.jsonl, .ndjson, or .json with one object a line): a line. Blank lines are skipped.
- JSON (.json): an item of the array; an object that holds one array of objects counts as that array, unless these are
  the turns of a conversation. Such a file is read whole.
- CSV (.csv, .tsv): a record under the header; empty lines are skipped.
- Parquet (.parquet): a row of the table.
- WebDataset (.tar): a sample, which is the consecutive files with one name up to its first dot.
- Text (.txt, .md): the whole file, one document. A file larger than `DOCUMENT` is a collection and comes in
  parts of about `PART`, cut at blank lines (at a line's end where no blank line comes), so that it can be
  shuffled, held out in part, and read in constant memory.

Each may be compressed (.gz, .zst). A damaged archive gives the rows before the damage and one `Rejected`.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import PurePath
from typing import Any

from stoker.data.files.byte_streams import (
    BOM,
    LARGEST_WHOLE,
    LINE_TOO_LONG,
    LONGEST_LINE,
    MAGIC,
    ByteStream,
    Check,
    utf8_advice,
)
from stoker.data.files.row_json import MARKED, ROWS, RepeatedKeyError, repeated_key_in, unparsed_reason
from stoker.data.files.rows import Raw, Rejected
from stoker.data.files.tables import NOT_UTF8, parquet_rows, table_rows
from stoker.data.files.tar_rows import tar_rows
from stoker.errors import Problem, UserError
from stoker.json_values import kind_of_json
from stoker.node_cache.remote_file import DataFile

JSON_LINES = (".jsonl", ".ndjson")
JSON = (".json",)
TABLES = (".csv", ".tsv")
TEXTS = (".txt", ".md")
PARQUET = (".parquet",)
ARCHIVES = (".tar",)
LOGS = (".svm", ".libsvm", ".ffm", ".libffm")  # read by `stoker.data.ranking.log_rows` only
SUFFIXES = (*JSON_LINES, *JSON, *TABLES, *PARQUET, *TEXTS, *ARCHIVES, *LOGS)
PACKED = (".zip", ".bz2", ".xz", ".7z", ".rar")  # not read
SPREADSHEETS = (".xlsx", ".xls", ".xlsm", ".ods", ".numbers")  # not read

DOCUMENT = 2**20
PART = 64 * 2**10

_SPACE = re.compile(r"[ \t\r\n]*")
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


@lru_cache(maxsize=1024)
def data_suffix(path: DataFile | str) -> str:
    """Returns the suffix that decides how a file is read (``.jsonl`` of ``a.jsonl.gz``); "" if it is not supported."""
    suffixes = [s.lower() for s in PurePath(str(path)).suffixes[-2:]]
    if suffixes and suffixes[-1] in MAGIC:
        suffixes.pop()
    return suffixes[-1] if suffixes and suffixes[-1] in SUFFIXES else ""


def known_kinds(name: str) -> str:
    """Returns the advice on a file whose kind is not read."""
    path = PurePath(name)
    if path.suffix.lower() in SPREADSHEETS:
        return (
            "save it as CSV UTF-8 in the spreadsheet program, or with pandas: "
            f"`pandas.read_excel('{path.name}').to_csv('{path.stem}.csv', index=False)`"
        )
    if path.suffix.lower() in PACKED:
        return "unpack it, or compress its file as .gz or .zst"
    known = " ".join(SUFFIXES)
    if PurePath(name.removesuffix(".gz").removesuffix(".zst")).suffix:
        return f"known are {known}, each also with .gz or .zst"
    return (
        f"known are {known}, each also with .gz or .zst; a click log without a suffix needs `format: criteo`, libsvm "
        "or libffm beside its path"
    )


def read_rows(
    path: DataFile, start: int = 0, *, most: int = LARGEST_WHOLE, check: Check | None = None
) -> Iterator[Raw | Rejected]:
    """Yields the rows of one file in order; broken rows as `Rejected` in their place.

    Args:
        start: number of rows to skip, broken ones included.
        most: most decompressed bytes of a file that has to be read whole (a JSON array, Parquet in an archive).
        check: called before each read of bytes, also of skipped rows; ends the reading by an exception.

    Raises:
        UserError: the file as a whole cannot be read: missing, of an unknown kind, not UTF-8 but UTF-16,
            a JSON array that breaks off, too large to be read whole, a package that its kind needs is not installed.
    """
    suffix = data_suffix(path)
    if not suffix:
        raise UserError(Problem(f"unknown kind of file: {path.name}", known_kinds(path.name)))
    if suffix in LOGS:
        raise UserError(Problem("rows of click logs are not text", "write `task: ranking`", file=str(path)))
    try:
        if suffix in PARQUET:
            yield from parquet_rows(path, start, most=most, check=check)
            return
        with ByteStream(path, check) as stream:
            is_json = suffix in JSON and not _are_json_lines(path, check)
            rows = _array(stream, path, most) if is_json else _stream_rows(stream, path, suffix)
            yield from itertools.islice(rows, start, None)
    except OSError as error:
        raise UserError(_problem(path, f"cannot be read: {error.strerror or error}")) from error


def decode(raw: Raw) -> dict[str, Any] | str | Rejected:
    """Returns a row's value: an object from JSON lines, a string from text, columns unchanged; or why it is
    rejected.
    """
    if isinstance(raw.value, dict):
        return raw.value
    try:
        text = raw.value.decode("utf-8")
    except UnicodeDecodeError as error:
        byte = raw.value[error.start]
        return Rejected(raw.source, raw.row, f"{NOT_UTF8}: 0x{byte:02x} at byte {error.start + 1}")
    value: Any = text
    if data_suffix(raw.source) in TEXTS:
        reason = "NUL byte in text" if "\0" in text else None
    else:
        value, reason = _parsed(text)
    return Rejected(raw.source, raw.row, reason) if reason else value


def _parsed(line: str) -> tuple[Any, str | None]:
    """Returns the object in a line of JSON, or the reason why it is invalid."""
    if not line.strip("\0 \t\r\n"):
        return None, "only NUL bytes"
    try:
        value = ROWS.decode(line)
    except json.JSONDecodeError as error:
        return None, f"not valid JSON: {error.msg.removesuffix(' at')} at column {error.colno}"
    except (RecursionError, ValueError) as error:
        return None, unparsed_reason(error)
    return value, _unfit(value, has_escapes=bool(_SURROGATE.search(line)))


def _problem(path: DataFile, message: str, suggestion: str = "", line: int = 0, column: int = 0) -> Problem:
    return Problem(message, suggestion, file=str(path), line=line, column=column)


def _unfit(value: Any, *, has_escapes: bool) -> str | None:
    """Returns why a JSON value is not a row, or None. Only escapes can write half a surrogate pair in JSON."""
    if isinstance(value, RepeatedKeyError):
        return str(value)
    if not isinstance(value, dict):
        return f"not an object: {kind_of_json(value)}"
    if has_escapes:
        try:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError:
            return "half a surrogate pair in a string"
        except RecursionError:
            return "nested too deeply"
    return None


def _stream_rows(stream: ByteStream, path: DataFile, suffix: str) -> Iterator[Raw | Rejected]:
    if suffix in ARCHIVES:
        yield from tar_rows(stream, path)
        return
    lines = stream.lines()
    if suffix in TABLES:
        yield from table_rows(lines, path, tabs=suffix == ".tsv")
    elif suffix in TEXTS:
        yield from _documents(lines, path)
    else:
        yield from _json_lines(lines, path)
    if stream.damage:
        yield Rejected(str(path), stream.line + 1, stream.damage)


def _json_lines(lines: Iterator[tuple[int, bytes]], path: DataFile) -> Iterator[Raw | Rejected]:
    source = str(path)
    for number, line in lines:
        if len(line) > LONGEST_LINE:
            yield Rejected(source, number, LINE_TOO_LONG)
        elif stripped := line.strip():
            yield Raw(source, number, stripped)


def _are_json_lines(path: DataFile, check: Check | None) -> bool:
    """Returns whether the first two non-blank lines are two objects, even broken ones, rather than parts of one.

    A first line that opens an array (``{"data": [``), or ends within one, belongs to an object around the rows.
    """
    with ByteStream(path, check) as stream:
        if stream.buffer.peek().removeprefix(BOM).lstrip().startswith(b"["):  # the first line may be the whole file
            return False
        full = (line.strip() for _, line in stream.lines() if len(line) <= LONGEST_LINE and line.strip())
        first, second = [*itertools.islice(full, 2), b"", b""][:2]
    if first.endswith((b"[", b"},")):
        return False
    return first.startswith(b"{") and bool(second) and (first.endswith(b"}") or second.startswith(b"{"))


def _documents(lines: Iterator[tuple[int, bytes]], path: DataFile) -> Iterator[Raw | Rejected]:
    """Yields the whole file if it has at most `DOCUMENT` bytes, else its parts."""
    begun: list[tuple[int, bytes]] = []
    size = 0
    for pair in lines:
        begun.append(pair)
        size += len(pair[1])
        if size > DOCUMENT:
            yield from _parts(itertools.chain(begun, lines), path)
            return
    if any(line.strip() for _, line in begun):
        yield Raw(str(path), 1, b"".join(line for _, line in begun))


def _parts(lines: Iterable[tuple[int, bytes]], path: DataFile) -> Iterator[Raw | Rejected]:
    source, size, first = str(path), 0, 0
    part: list[bytes] = []
    for number, line in lines:
        if len(line) > LONGEST_LINE:
            yield Rejected(source, number, LINE_TOO_LONG)
            continue
        blank = not line.strip()
        if blank and not part:
            continue
        if not part:
            first = number
        part.append(line)
        size += len(line)
        # A text without blank lines is cut at the end of a line, four times later.
        if size >= 4 * PART or (blank and size >= PART):
            yield Raw(source, first, b"".join(part))
            part, size = [], 0
    if part:
        yield Raw(source, first, b"".join(part))


def _array(stream: ByteStream, path: DataFile, most: int) -> Iterator[Raw | Rejected]:
    """Yields the items of a JSON array, parsed one at a time out of the file's text."""
    text = _whole_text(stream, path, most)
    if not text.strip():
        return
    has_escapes = bool(_SURROGATE.search(text))
    try:
        for item, value in enumerate(_items(text), start=1):
            reason = _unfit(value, has_escapes=has_escapes)
            yield Rejected(str(path), item, reason) if reason else Raw(str(path), item, value)
    except json.JSONDecodeError as error:
        advice = "mend the file, or write one object a line (.jsonl), where a broken row costs only itself"
        message = f"not valid JSON: {error.msg.removesuffix(' at').removesuffix(' starting')}"
        raise UserError(_problem(path, message, advice, error.lineno, error.colno)) from error
    except (RecursionError, ValueError) as error:
        raise UserError(_problem(path, unparsed_reason(error))) from error


def _whole_text(stream: ByteStream, path: DataFile, most: int) -> str:
    data = bytearray()
    for block in stream.blocks(most, "write one object a line (.jsonl), which is read row by row"):
        data += block
    if data.startswith(BOM):
        del data[: len(BOM)]
    if stream.damage:
        raise UserError(_problem(path, stream.damage, "a JSON array is read whole or not at all"))
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        column = error.start - data.rfind(b"\n", 0, error.start)
        raise UserError(_problem(path, NOT_UTF8, utf8_advice(path), line, column)) from error


def _items(text: str) -> Iterator[Any]:
    """Yields the items of the array in `text`, or of its only array of objects, or the object itself.

    For an item with a repeated key it yields the error.
    """
    at = _after_space(text, 0)
    if text[at] != "[":
        has_error = False
        try:
            value = ROWS.decode(text)
        except RepeatedKeyError:
            value, has_error = MARKED.decode(text), True
            if isinstance(value, RepeatedKeyError):
                raise value from None
        arrays = [v for v in value.values() if isinstance(v, list)] if isinstance(value, dict) else []
        rows = arrays[0] if len(arrays) == 1 else []
        is_table = rows and all(isinstance(item, dict | RepeatedKeyError) for item in rows)
        if is_table and not all(_is_turn(item) for item in rows if isinstance(item, dict)):
            yield from map(_or_error, rows) if has_error else rows
        else:
            yield _or_error(value) if has_error else value
        return
    at = _after_space(text, at + 1)
    while text[at : at + 1] != "]":
        try:
            value, at = ROWS.raw_decode(text, at)
        except RepeatedKeyError as error:
            value, at = error, json.JSONDecoder().raw_decode(text, at)[1]
        yield value
        at = _after_space(text, at)
        if text[at : at + 1] == ",":
            comma, at = at, _after_space(text, at + 1)
            if text[at : at + 1] == "]":
                raise json.JSONDecodeError("Illegal trailing comma before end of array", text, comma)
        elif text[at : at + 1] != "]":
            raise json.JSONDecodeError("Expecting ',' delimiter or ']'", text, at)
    if (end := _after_space(text, at + 1)) != len(text):
        raise json.JSONDecodeError("Extra data", text, end)


def _or_error(value: Any) -> Any:
    return repeated_key_in(value) or value


def _is_turn(item: dict[str, Any]) -> bool:
    return ("role" in item and ("content" in item or "tool_calls" in item)) or {"from", "value"} <= item.keys()


def _after_space(text: str, at: int) -> int:
    return _SPACE.match(text, at).end()  # type: ignore[union-attr]
