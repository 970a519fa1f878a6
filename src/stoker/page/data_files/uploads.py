"""Files that users upload, and their versions: each in a separate folder below ``uploads/``.

An upload comes in parts, each at the byte offset where the previous one ended; after a lost connection it continues
there. A version is a new file without some rows, or with other values in them, with a record of its source.
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import shutil
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import count
from pathlib import Path, PurePath
from typing import Any

from starlette.concurrency import run_in_threadpool

from stoker.data.files.byte_streams import Check
from stoker.data.files.readers import SPREADSHEETS, SUFFIXES, data_suffix, decode, read_rows
from stoker.data.files.rows import Raw, Rejected
from stoker.files import no_link, read_file, replace_file
from stoker.json_values import as_text
from stoker.page.data_files.file_names import LONGEST, cut, file_name, shortened
from stoker.page.page_error import PageError, bad_request, http_error, not_found
from stoker.page.page_settings import CHUNK

ID = re.compile(r"[0-9a-f]{16}")
LARGEST = 1 << 40  # bytes of a file
SPARE = 1 << 28  # bytes that an upload leaves on the disk
FLUSH = 1 << 20
SILENCE = 30.0  # seconds without a byte, after which a part has ended
WHOLE = 1 << 28  # bytes of a file that this process reads whole, such as a JSON array
MOST_ROWS = 500
ANSWER = 4 << 20  # characters of rows in one answer
MOST_PLACES = 100  # of rows that cannot be read, in the record of a version
VERSION = 20  # bytes of a version's ending: -v2.jsonl
RECORD = "upload.json"


@dataclass(frozen=True)
class Upload:
    """An uploaded file.

    Attributes:
        size: bytes that it has when it is whole.
        parent: the id of the upload that it is a version of; empty for none.
        changes: how many rows were left out, edited, and not taken over as they cannot be read.
        unreadable: {row, reason} of the first rows that cannot be read.
    """

    id: str
    name: str
    size: int
    user: str
    time: float
    parent: str = ""
    changes: Mapping[str, int] = field(default_factory=dict)
    unreadable: Sequence[Mapping[str, Any]] = ()


class Uploads:
    """The uploads of a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writing: set[str] = set()
        self._lock = threading.Lock()

    def begin(self, name: str, size: int, user: str) -> Upload:
        """Makes room for a file.

        Raises:
            PageError: its kind is not read, or the disk has not enough room.
        """
        name = clean_name(name)
        if shutil.disk_usage(self._folder).free < size + SPARE:
            raise http_error(507, "the disk has no room for {size} bytes", size=size)
        upload = Upload(secrets.token_hex(8), name, size, user, round(time.time(), 3))
        place = self._folder / upload.id
        place.mkdir(mode=0o700)
        (place / name).touch(mode=0o600, exist_ok=False)
        replace_file(place / RECORD, json.dumps(asdict(upload)))
        return upload

    def find(self, key: str) -> Upload:
        """Returns the upload of an id.

        Raises:
            PageError: there is no such upload.
        """
        if ID.fullmatch(key):
            with suppress(OSError, ValueError, TypeError):
                upload = Upload(**json.loads(read_file(self._folder / key / RECORD)))
                if upload.id == key and PurePath(upload.name).name == upload.name and self.path(upload).is_file():
                    return upload
        raise not_found("there is no upload of this id", "GET /api/data lists them")

    def path(self, upload: Upload) -> Path:
        """Returns the path of the file."""
        return self._folder / upload.id / upload.name

    def offset(self, upload: Upload) -> int:
        """Bytes that have come."""
        return self.path(upload).stat().st_size

    def is_whole(self, upload: Upload) -> bool:
        """Returns whether all of a file has come; rows may have been appended to it since."""
        return self.offset(upload) >= upload.size

    def all(self) -> list[Upload]:
        """Returns all uploads, the newest first; those whose record or file is broken are left out."""
        found = []
        for place in self._folder.iterdir():
            with suppress(PageError):
                found.append(self.find(place.name))
        return sorted(found, key=lambda upload: -upload.time)

    async def append(self, upload: Upload, offset: int, parts: AsyncIterator[bytes]) -> int:
        """Writes a part of a file; returns how many bytes the file has now.

        Raises:
            PageError: the part does not begin where the file ends, goes beyond its size, stops arriving, or another is
                being written.
        """
        with self._lock:
            if upload.id in self._writing:
                raise http_error(409, "another part of this file is being written", retry_after=1)
            self._writing.add(upload.id)
        try:
            now = await run_in_threadpool(self.offset, upload)
            if offset != now:
                raise http_error(
                    409,
                    "the file has {now} bytes, and this part begins at {offset}",
                    "continue at byte {now}",
                    now=str(now),
                    offset=str(offset),
                )
            with open(self.path(upload), "ab", buffering=FLUSH, opener=no_link) as file:
                came = 0
                async for part in _without_silence(parts):
                    came += len(part)
                    if now + came > upload.size or came > CHUNK:
                        raise http_error(
                            413, "the file has {size} bytes, a part {most} at most", size=upload.size, most=CHUNK
                        )
                    await run_in_threadpool(file.write, part)
            return now + came
        except OSError as error:
            raise http_error(507, "the file cannot be written: {reason}", reason=str(error.strerror)) from error
        finally:
            with self._lock:
                self._writing.discard(upload.id)

    def rows(self, upload: Upload, offset: int, limit: int, row: int = 0, *, check: Check) -> list[dict[str, Any]]:
        """Returns unparsed rows; ``row`` is a row's number as in messages, such as its line in the file.

        ``text`` is the value as JSON, in which a browser keeps integers beyond 2**53. Rows beyond `ANSWER` have none.

        Args:
            offset: number of rows to skip.
            row: the number of the first row; 0 for the first after ``offset``.
            check: see `read_rows`.

        Raises:
            PageError: no row has this number.
        """
        found: list[dict[str, Any]] = []
        left = ANSWER
        for raw in read_rows(self.path(upload), offset, most=WHOLE, check=check):
            if len(found) >= limit:
                break
            if not found and row and raw.row != row:
                continue
            check()
            value = decode(raw) if isinstance(raw, Raw) else raw
            problem = value.reason if isinstance(value, Rejected) else ""
            text = "" if problem else json.dumps(_columns(value), ensure_ascii=False, indent=1, default=as_text)
            if len(text) > left:
                text, problem = "", f"not shown: an answer has at most {ANSWER >> 20} MiB of rows"
            left -= len(text)
            found.append({"row": raw.row, "value": None if problem else value, "text": text, "problem": problem})
        if row and not found:
            raise _no_row(404, upload, row)
        return found

    def version(self, upload: Upload, exclude: set[int], edit: Mapping[int, Any], user: str, *, check: Check) -> Upload:
        """Writes a new file without some rows and with other values in some; the old one is unchanged.

        Rows that cannot be read are left out; the record counts them and names the first.

        Args:
            check: see `read_rows`.

        Raises:
            PageError: a row does not exist, or the upload is incomplete.
        """
        if not self.is_whole(upload):
            raise http_error(409, "the upload is incomplete")
        stem = cut(re.sub(r"(-v\d+)?(\.[A-Za-z]+)+$", "", upload.name), LONGEST - VERSION)
        names = {each.name for each in (*self.all(), *self.removed())}
        name = next(each for number in count(2) if (each := f"{stem}-v{number}.jsonl") not in names)
        made = Upload(secrets.token_hex(8), name, 0, user, round(time.time(), 3), upload.id)
        place = self._folder / made.id
        place.mkdir(mode=0o700)
        try:
            seen: set[int] = set()
            broken: list[Rejected] = []
            with (place / made.name).open("xb") as file:
                for line in self._changed(upload, exclude, edit, seen, broken, check):
                    file.write(line)
                made = replace(
                    made,
                    size=file.tell(),
                    changes={"excluded": len(exclude), "edited": len(edit), "unreadable": len(broken)},
                    unreadable=[{"row": each.row, "reason": each.reason} for each in broken[:MOST_PLACES]],
                )
            if absent := (exclude | set(edit)) - seen:
                raise _no_row(400, upload, min(absent))
            replace_file(place / RECORD, json.dumps(asdict(made)))
        except BaseException:
            shutil.rmtree(place, ignore_errors=True)
            raise
        return made

    def _changed(
        self,
        upload: Upload,
        exclude: set[int],
        edit: Mapping[int, Any],
        seen: set[int],
        broken: list[Rejected],
        check: Check,
    ) -> Iterator[bytes]:
        """Yields the lines of a version; records existing rows in ``seen`` and unreadable ones in ``broken``."""
        for raw in read_rows(self.path(upload), most=WHOLE, check=check):
            check()
            seen.add(raw.row)
            if raw.row in exclude:
                continue
            value: Any = edit[raw.row] if raw.row in edit else decode(raw) if isinstance(raw, Raw) else raw
            if isinstance(value, Rejected):
                broken.append(value)
                continue
            yield (json.dumps(_columns(value), ensure_ascii=False, default=as_text) + "\n").encode()

    def as_json(self, upload: Upload) -> dict[str, Any]:
        """Returns an upload in the API's form; ``path`` is its path in a job."""
        done, path = self.is_whole(upload), str(self.path(upload))
        return {**asdict(upload), "offset": self.offset(upload), "done": done, "path": path}

    def places_aside(self, upload: Upload) -> tuple[Path, Path]:
        """Returns the folder of an upload, and the one to which it is moved when it is removed from the list."""
        return self._folder / upload.id, self._folder / f"removed-{upload.id}-{time.time_ns()}"

    def removed(self) -> list[Upload]:
        """Returns the uploads that were taken off the list, the last removed first, without broken ones."""
        found = []
        for place in sorted(
            self._folder.glob("removed-*"), key=lambda path: path.name.rpartition("-")[2], reverse=True
        ):
            with suppress(OSError, ValueError, TypeError):
                upload = Upload(**json.loads(read_file(place / RECORD)))
                if place.name.startswith(f"removed-{upload.id}-"):
                    found.append(upload)
        return found

    def restore(self, key: str) -> Upload:
        """Puts a removed upload back on the list.

        Raises:
            PageError: none of this id was removed, or there is one of this id.
        """
        place = self.places_of_removed(key)[-1]
        if (self._folder / key).exists():
            raise http_error(409, "there is a file of this id")
        place.rename(self._folder / key)
        return self.find(key)

    def delete(self, key: str) -> None:
        """Deletes a removed upload for good.

        Raises:
            PageError: none of this id was removed.
        """
        for place in self.places_of_removed(key):
            shutil.rmtree(place)

    def places_of_removed(self, key: str) -> list[Path]:
        """Returns the folders of a removed upload, at least one.

        Raises:
            PageError: none of this id was removed.
        """
        places = sorted(self._folder.glob(f"removed-{key}-*")) if ID.fullmatch(key) else []
        if not places:
            raise not_found("no file of this id was removed", "GET /api/removed-data lists them")
        return places


def is_incomplete(path: Path, folder: Path) -> bool:
    """Returns whether a path is that of an upload below ``folder`` of which a part is missing."""
    try:
        parts = path.resolve().relative_to(folder).parts
        uploads = Uploads(folder)
        upload = uploads.find(parts[0]) if len(parts) == 2 else None
    except (OSError, RuntimeError, ValueError, PageError):
        return False
    return upload is not None and upload.name == parts[1] and not uploads.is_whole(upload)


async def _without_silence(parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yields the bytes of a request.

    Raises:
        PageError: none arrive for `SILENCE` seconds.
    """
    while True:
        try:
            async with asyncio.timeout(SILENCE):
                part = await anext(parts, None)
        except TimeoutError:
            raise http_error(408, "no byte was received within {seconds} s", seconds=SILENCE) from None
        if part is None:
            return
        yield part


def _columns(value: Any) -> Any:
    """Returns a row as it is written in JSON lines."""
    return {"text": value} if isinstance(value, str) else value


def _no_row(status: int, upload: Upload, row: int) -> PageError:
    hint = "GET /api/data/ID/rows has the numbers"
    return http_error(status, "{name} has no row {row}", hint, name=upload.name, row=row)


def clean_name(name: str) -> str:
    """Returns the name of a file, without folders, of a kind that is read; a long one is cut before its suffix.

    Raises:
        PageError: it is no such name.
    """
    found = file_name(name)
    kind = data_suffix(found)
    if found == RECORD:
        raise bad_request("`{name}` is a name of the page's own files", "give the file another name", name=found)
    if not kind:
        known = " ".join(SUFFIXES)
        hint = "supported: {known}, also .gz and .zst"
        if PurePath(found).suffix.lower() in SPREADSHEETS:
            hint = "save it as CSV UTF-8 in the spreadsheet program"
        raise bad_request("unsupported file type: `{name}`", hint, name=name[:60], known=known)
    suffixes = PurePath(found).suffixes
    ending = suffixes[-1] if suffixes[-1].lower() == kind else "".join(suffixes[-2:])  # .jsonl, .jsonl.gz
    return shortened(found, ending)
