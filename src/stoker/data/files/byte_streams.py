"""The bytes and lines of a file, plain or compressed; a damaged archive is read up to the damage."""

from __future__ import annotations

import gzip
import io
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from stoker.errors import Problem, UserError
from stoker.node_cache.remote_file import DataFile, RemoteFile

Check = Callable[[], object]

BOM = b"\xef\xbb\xbf"
# No real sample is longer, and without a bound a file without newlines would fill the memory.
LONGEST_LINE = 64 * 2**20
LINE_TOO_LONG = f"longer than {LONGEST_LINE >> 20} MiB"  # the reason of such a row
LARGEST_WHOLE = 32 * 2**30
"""Most decompressed bytes of a file that is read whole: a JSON array, or Parquet in an archive."""

RUN = 16  # empty lines after which the following ones are read together: it copies the whole buffer
ARCHIVE_PIECE = 2**10  # bytes of an archive that are unpacked at a time; zstd makes at most 32 MiB of them

_HIGH = re.compile(rb"[\x80-\xff]")
_ALONE = re.compile(rb"(?<![\x80-\xff])[\x80-\xff](?![\x80-\xff])")
_EMPTY_LINES = re.compile(rb"[\r\n]*\n")
# How archives begin; a .zst may also begin with a skippable frame, whose first byte varies.
MAGIC = {".gz": (b"\x1f\x8b",), ".zst": (b"\x28\xb5\x2f\xfd", b"\x2a\x4d\x18")}
NOT_PLAIN = (*MAGIC, ".parquet", ".tar")  # their bytes are not their texts
WRITE_UTF8 = "write its texts as UTF-8"
DAMAGED = "damaged"  # begins the reasons of a row that stands for all that an archive or a Parquet file has lost
REPLACE = "replace the file, or write `max_dropped: 1` to train on the rows that can be read"


class ByteStream:
    """A file's decompressed bytes, as `buffer`, and its lines.

    Args:
        check: called before each read of bytes; ends the reading by an exception.

    Attributes:
        line: number of the last line that `lines` yielded.

    Raises:
        UserError: the file is not the kind of archive that its suffix names, or is UTF-16.
    """

    def __init__(self, path: DataFile, check: Check | None = None) -> None:
        self.path = path
        self.line = 0
        self._archive: _Archive | None = None
        if path.suffix.lower() in MAGIC:
            self._archive = _Archive(path)
            self.buffer: io.BufferedReader[Any] = io.BufferedReader(self._archive, 2**16)
        else:
            self.buffer = opened(path)
        if check is not None:
            self.buffer = io.BufferedReader(_Checked(self.buffer, check), 2**18)

    def __enter__(self) -> ByteStream:
        return self

    def __exit__(self, *error: object) -> None:
        self.buffer.close()

    @property
    def damage(self) -> str:
        """The reason why the archive is damaged; empty if it is sound, or has only been read up to here."""
        return self._archive.damage if self._archive else ""

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """Yields (number, line with its end), without the byte order mark.

        A line over `LONGEST_LINE` is cut one byte after that. The last line of a damaged archive is left out if it is
        partial. The rest of a long run of empty lines is one item with the number of its first.
        """
        empty = 0  # such lines immediately before
        while line := self.buffer.readline(LONGEST_LINE + 1):
            if self.line == 0:
                if line.startswith((b"\xff\xfe", b"\xfe\xff")):
                    advice = utf8_advice(self.path, "UTF-16")
                    raise UserError(Problem("this is UTF-16, not UTF-8", advice, file=str(self.path), line=1))
                line = line.removeprefix(BOM)
            if len(line) > LONGEST_LINE and not line.endswith(b"\n"):
                while (rest := self.buffer.readline(2**20)) and not rest.endswith(b"\n"):
                    pass
            elif self.damage and not line.endswith(b"\n"):
                return
            number = self.line = self.line + 1
            empty = empty + 1 if line in (b"\n", b"\r\n") else 0
            if empty >= RUN and (run := _EMPTY_LINES.match(self.buffer.peek())):
                line += self.buffer.read(run.end())
                self.line += run.group().count(b"\n")
            yield number, line

    def blocks(self, most: int, advice: str) -> Iterator[bytes]:
        """Yields all bytes in blocks.

        Raises:
            UserError: there are more than ``most``; ``advice`` says what to write instead.
        """
        size = 0
        while block := self.buffer.read(2**20):
            size += len(block)
            if size > most:
                message = f"larger than {most >> 20:,} MiB: too large to be read whole"
                raise UserError(Problem(message, advice, file=str(self.path)))
            yield block


def opened(path: DataFile) -> io.BufferedReader[Any]:
    """Opens a file's stored (still compressed) bytes, from the disk or from its URL."""
    return io.BufferedReader(path.open() if isinstance(path, RemoteFile) else io.FileIO(path), 2**18)


def utf8_advice(path: DataFile, encoding: str = "") -> str:
    """Returns advice on a file in another encoding: of plain text the command that converts it.

    Args:
        encoding: by default the most likely one.
    """
    with suppress(OSError):
        if path.suffix.lower() not in NOT_PLAIN:
            name, encoding = path.name, encoding or _encoding_of(path)
            return f"save it as UTF-8 where it was written, or: iconv -f {encoding} -t UTF-8 {name} > new{path.suffix}"
    return WRITE_UTF8


def _encoding_of(path: DataFile) -> str:
    """Returns the most likely encoding of a file that is not UTF-8: gb18030, cp1251 or cp1252."""
    with ByteStream(path) as stream:
        sample = stream.buffer.read(2**20)
    sample = sample[: sample.rfind(b"\n") + 1] or sample
    high = len(_HIGH.findall(sample))
    alone = len(_ALONE.findall(sample))
    if 2 * alone > high:  # letters with accents among ASCII ones
        return "cp1252"
    try:
        sample.decode("gb18030")
    except UnicodeDecodeError:
        return "cp1251"
    return "gb18030"


class _Checked(io.RawIOBase):
    """Bytes with a check before each read."""

    def __init__(self, source: io.BufferedReader[Any], check: Check) -> None:
        super().__init__()
        self._source, self._check = source, check

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._check()
        return self._source.readinto1(buffer)

    def close(self) -> None:
        self._source.close()
        super().close()


class _Archive(io.RawIOBase):
    """An archive's bytes up to its end or to the damage in it."""

    def __init__(self, path: DataFile) -> None:
        super().__init__()
        self.damage = ""
        suffix = path.suffix.lower()
        with opened(path) as file:
            head = file.read(4)
        if not any(magic in (head[: len(magic)], head[1:]) for magic in MAGIC[suffix]):
            raise UserError(Problem(f"not a {suffix} archive, despite its name", file=str(path)))
        self._blocks = _gzip_blocks(path) if suffix == ".gz" else _zstandard_blocks(path)
        self._rest = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self._rest and not self.damage:
            try:
                self._rest = next(self._blocks, b"")
            except (EOFError, zlib.error, gzip.BadGzipFile) as error:
                self.damage = f"damaged archive: {error}"
        count = min(len(buffer), len(self._rest))
        buffer[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count


def _gzip_blocks(path: DataFile) -> Iterator[bytes]:
    with opened(path) as stored, gzip.GzipFile(fileobj=stored) as file:
        while block := file.read1(2**16):
            yield block


def _zstandard_blocks(path: DataFile) -> Iterator[bytes]:
    try:
        import zstandard
    except ImportError as error:
        problem = Problem("reading .zst needs zstandard", "pip install 'stoker[zstd]'", file=str(path))
        raise UserError(problem) from error
    # The library's own reader treats a truncated file as complete; the object below detects the end of its frame.
    decompressor = zstandard.ZstdDecompressor(max_window_size=2**31)
    with opened(path) as file:
        frame = decompressor.decompressobj()
        begun = False
        while data := file.read(ARCHIVE_PIECE):
            while data:
                if frame.eof:
                    frame, begun = decompressor.decompressobj(), False
                begun = True
                try:
                    block = frame.decompress(data)
                except zstandard.ZstdError as error:
                    raise EOFError(str(error)) from error
                if block:
                    yield block
                data = frame.unused_data if frame.eof else b""
        if begun and not frame.eof:
            raise EOFError("it ends before its end-of-frame mark")
