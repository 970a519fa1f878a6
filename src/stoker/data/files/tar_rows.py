"""Reads rows of WebDataset shards: tar archives in which the files of a sample are adjacent.

A file's name up to its first dot is its sample's key, the rest names the column: ``0007.txt`` gives
``text``, ``0007.prompt.txt`` the text ``prompt``, ``0007.tools.json`` the value ``tools``, and ``0007.json`` an object
whose keys are columns. Files of other kinds (images, sound, pickles) are left out.
"""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator
from itertools import groupby
from typing import Any, Self

from stoker.data.files.byte_streams import LINE_TOO_LONG, LONGEST_LINE, ByteStream
from stoker.data.files.row_json import ROWS, unparsed_reason
from stoker.data.files.rows import Raw, Rejected
from stoker.json_values import kind_of_json
from stoker.node_cache.remote_file import DataFile

TEXT = ("txt", "text", "md")
JSON = "json"
LABEL = "cls"  # a class, as a number or a word
MOST_HEADERS = 16  # before a file, for long names and attributes
LONGEST_HEADER = 2**20
EXTENSIONS = (
    *(tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK),
    *(tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE),
)
SPARSE = "a sparse file with a long map"
Member = tuple[str, str, bytes | None]  # the sample's name, the column's, the content; None if it is too long


def tar_rows(stream: ByteStream, path: DataFile) -> Iterator[Raw | Rejected]:
    """Yields the samples of a shard in their order, broken ones as `Rejected` in their place."""
    source, row = str(path), 0
    damage: list[str] = []
    for _, members in groupby(_members(stream, damage), key=lambda member: member[0]):
        sample = list(members)
        if damage:  # a partial sample is dropped
            break
        row += 1
        value = _columns(sample)
        yield Rejected(source, row, value) if isinstance(value, str) else Raw(source, row, value)
    if damage or stream.damage:
        yield Rejected(source, row + 1, stream.damage or damage[0])


class _Archive(tarfile.TarFile):
    """An archive; `_Header` counts in it how many headers precede a file."""

    headers = 0


class _Header(tarfile.TarInfo):
    """The header of a file in an archive. `tarfile` takes a damaged or missing one for the end; here it is an error.

    So is a long list of headers before one file, or one that is too long: `tarfile` reads each as a whole. So is a
    sparse file whose map has blocks of its own, of which `tarfile` reads any number.
    """

    @classmethod
    def frombuf(cls, buffer: bytes | bytearray, encoding: str, errors: str) -> Self:
        found = super().frombuf(buffer, encoding, errors)
        if found.type in EXTENSIONS and found.size > LONGEST_HEADER:
            raise tarfile.ReadError(f"a header of {found.size} bytes")
        if found.type == tarfile.GNUTYPE_SPARSE and found._sparse_structs[1]:  # type: ignore[attr-defined]
            raise tarfile.ReadError(SPARSE)
        return found

    def _proc_gnusparse_10(self, *_: object) -> None:
        raise tarfile.ReadError(SPARSE)

    @classmethod
    def fromtarfile(cls, archive: tarfile.TarFile) -> Self:
        assert isinstance(archive, _Archive)
        archive.headers += 1
        try:
            if archive.headers > MOST_HEADERS:
                raise tarfile.ReadError(f"more than {MOST_HEADERS} headers before one file")
            return super().fromtarfile(archive)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]  # the end mark
            raise
        except tarfile.HeaderError as error:
            raise tarfile.ReadError(str(error)) from error
        finally:
            archive.headers -= 1


def _members(stream: ByteStream, damage: list[str]) -> Iterator[Member]:
    """Yields the files of an archive up to its end or to the damage; a truncated file is left out."""
    try:
        with _Archive.open(fileobj=stream.buffer, mode="r|", tarinfo=_Header) as archive:
            for info in archive:
                archive.members.clear()  # type: ignore[attr-defined]  # each with its headers
                archive.pax_headers.clear()  # type: ignore[attr-defined]  # they apply to all later files; none names a sample
                folder, _, base = info.name.rpartition("/")
                if not info.isfile() or base.startswith(("._", "__")) or base == ".DS_Store":
                    continue
                name, _, column = base.partition(".")
                long = info.size > LONGEST_LINE
                content = None
                if not long and _is_read(column.lower()):
                    file = archive.extractfile(info)
                    assert file is not None
                    content = file.read()
                yield f"{folder}/{name}", column.lower(), content if not long else None
    except (tarfile.TarError, EOFError, ValueError, OverflowError) as error:  # numbers of sparse maps are not checked
        damage.append(f"damaged archive: {error}")


def _is_read(column: str) -> bool:
    return column.rpartition(".")[2] in (*TEXT, JSON, LABEL)


def _columns(members: list[Member]) -> dict[str, Any] | str:
    """Returns the columns of a sample, or the reason why it has none."""
    values: dict[str, Any] = {}
    escapes = False  # only they can write half a surrogate pair
    for _, column, content in members:
        if not _is_read(column):
            continue
        if content is None:
            return LINE_TOO_LONG
        try:
            text = content.decode("utf-8")
        except UnicodeDecodeError:
            return f"not valid UTF-8: .{column}"
        escapes = escapes or "\\u" in text
        found = _column(column, text)
        if isinstance(found, str):
            return found
        if twice := found.keys() & values.keys():
            return f"a column occurs twice: {min(twice)}"
        values |= found
    if escapes and not _is_text(values):
        return "half a surrogate pair in a string"
    return values or f"no text and no JSON: .{members[0][1]}"


def _is_text(values: dict[str, Any]) -> bool:
    try:
        json.dumps(values, ensure_ascii=False).encode("utf-8")
    except (UnicodeEncodeError, RecursionError):
        return False
    return True


def _column(column: str, text: str) -> dict[str, Any] | str:
    """Returns the columns of one file, or the reason why it has none."""
    name, _, kind = column.rpartition(".")
    if kind in TEXT:
        return "NUL byte in text" if "\0" in text else {name or "text": text}
    if kind == LABEL:
        return {name or "label": text.strip()}
    try:
        value = ROWS.decode(text)
    except json.JSONDecodeError as error:
        return f"not valid JSON: .{column}, {error.msg.removesuffix(' at')} at column {error.colno}"
    except (RecursionError, ValueError) as error:
        return unparsed_reason(error)
    if name:
        return {name: value}
    return value if isinstance(value, dict) else f"not an object: {kind_of_json(value)}"
