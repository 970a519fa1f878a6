"""Reads rows of tables: CSV, whose cells are text, and Parquet, whose columns have types."""

from __future__ import annotations

import csv
import itertools
import tempfile
from collections import Counter
from collections.abc import Iterator
from typing import IO, Any

from stoker.data.files.byte_streams import LINE_TOO_LONG, LONGEST_LINE, MAGIC, ByteStream, Check, utf8_advice
from stoker.data.files.rows import Raw, Rejected
from stoker.errors import Problem, UserError
from stoker.node_cache.remote_file import DataFile, RemoteFile

NOT_UTF8 = "not valid UTF-8"
BATCH = 1024  # rows of Parquet decoded at a time
_NAN = frozenset({"NaN", "nan"})  # as pandas and numpy write a missing number into a cell
_BAD_BYTE = frozenset(map(chr, range(0xDC80, 0xDD00)))  # "surrogateescape" makes these of bytes not UTF-8


def table_rows(lines: Iterator[tuple[int, bytes]], path: DataFile, *, tabs: bool) -> Iterator[Raw | Rejected]:
    """Yields the records under a CSV header as {column: cell}; a record's row is the line it begins on.

    The separator is a tab where `tabs`, else the most frequent in the header of comma, semicolon, tab and vertical bar.
    A cell that holds only NaN becomes the number, so that it is refused like one.

    Raises:
        UserError: no usable header.
    """
    source = str(path)
    header = next(lines, None)
    if header is None:
        return
    csv.field_size_limit(LONGEST_LINE)
    first = _decoded(header[1])
    separator = "\t" if tabs else max(",;\t|", key=first.count)
    read = cut = 0  # lines, and the last one that is cut

    def text() -> Iterator[str]:
        nonlocal read, cut
        for number, line in itertools.chain([header], lines):
            if len(line) > LONGEST_LINE and not line.endswith(b"\n"):
                cut = number
            read = number + max(0, line.count(b"\n") - 1)  # empty lines come in runs
            yield _decoded(line)

    reader = csv.reader(text(), delimiter=separator, strict=True)
    columns = _columns(reader, path)
    while True:
        row = read + 1
        try:
            cells = next(reader, None)
        except csv.Error as error:
            yield Rejected(source, row, _csv_reason(str(error), read - row))
            continue
        if cells is None:
            return
        if not cells:
            continue
        if cut >= row:
            yield Rejected(source, row, LINE_TOO_LONG)
        elif len(cells) != len(columns):
            yield Rejected(source, row, f"wrong number of cells: {len(cells)}, the header has {len(columns)}")
        elif any(not _BAD_BYTE.isdisjoint(cell) for cell in cells if not cell.isascii()):
            yield Rejected(source, row, NOT_UTF8)
        elif any("\0" in cell for cell in cells):
            yield Rejected(source, row, "NUL byte in text")
        else:
            values = (float("nan") if cell.strip() in _NAN else cell for cell in cells)
            yield Raw(source, row, dict(zip(columns, values, strict=True)))


def _decoded(line: bytes) -> str:
    return line.decode("utf-8", "surrogateescape")


def _columns(reader: Any, path: DataFile) -> list[str]:
    try:
        columns = [name.strip() for name in next(reader)]
    except (csv.Error, StopIteration) as error:
        reason = _csv_reason(str(error), reader.line_num - 1)
        raise UserError(Problem(f"no usable header: {reason}", file=str(path), line=1)) from error
    twice = sorted(name for name, count in Counter(columns).items() if count > 1)
    if not columns or twice or any(not _BAD_BYTE.isdisjoint(name) for name in columns):
        what = f"column {twice[0]!r} occurs twice" if twice else "it is empty or not UTF-8"
        advice = "name each column once" if twice or not columns else utf8_advice(path)
        raise UserError(Problem(f"no usable header: {what}", advice, file=str(path), line=1))
    return columns


def _csv_reason(message: str, lines: int) -> str:
    if message == "unexpected end of data":
        return f"not valid CSV: a quote opened here is never closed, {lines} more lines are lost in it"
    if message.startswith("new-line"):
        return "not valid CSV: its lines end in CR alone; convert them to LF, as `tr '\\r' '\\n'` does"
    if message.startswith("field larger"):
        return LINE_TOO_LONG
    return f"not valid CSV: {message}"


def parquet_rows(path: DataFile, start: int, *, most: int, check: Check | None) -> Iterator[Raw | Rejected]:
    """Yields the rows of a Parquet file from the one numbered `start` (from 0) on, row group by row group.

    Args:
        check: called after each batch; ends the reading by an exception.

    Raises:
        UserError: pyarrow is not installed, or the file is not Parquet, or is an archive of more than ``most`` bytes.
    """
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        problem = Problem("reading .parquet needs pyarrow", "pip install 'stoker[parquet]'", file=str(path))
        raise UserError(problem) from error
    source = str(path)
    with _seekable(path, most) as file:
        try:
            plain = pq.ParquetFile(file)
            text = [column.path for column in plain.schema if column.physical_type == "BYTE_ARRAY"]
            table = pq.ParquetFile(file, read_dictionary=text)  # a repeated value is in memory once
        except (pa.ArrowException, OSError) as error:
            raise UserError(Problem(f"not a Parquet file: {_first_line(error)}", file=source)) from error
        before = 0  # rows of the row groups so far
        for group in range(table.num_row_groups):
            row, before = before, before + table.metadata.row_group(group).num_rows
            if before <= start:
                continue
            try:
                for batch in table.iter_batches(batch_size=BATCH, row_groups=[group]):
                    rows = _batch_rows(batch, plain.schema_arrow, source, row)
                    yield from itertools.islice(rows, max(0, start - row), None)
                    row += batch.num_rows
                    if check is not None:
                        check()
            except (pa.ArrowException, OSError) as error:
                # Only the rest of a damaged row group is lost.
                reason = f"damaged Parquet: {before - row} rows are lost, {_first_line(error)}"
                yield Rejected(source, row + 1, reason)


def _batch_rows(batch: Any, schema: Any, source: str, before: int) -> Iterator[Raw | Rejected]:
    import numpy as np

    sizes = sum(map(_value_bytes, batch.columns))
    try:
        if np.sum(sizes) <= LONGEST_LINE:
            for offset, value in enumerate(batch.cast(schema).to_pylist(), start=1):
                yield Raw(source, before + offset, value)
            return
    except (ValueError, OverflowError, KeyError):
        pass  # some row of the batch cannot be turned into Python objects: find which, one at a time
    for offset in range(batch.num_rows):
        if sizes[offset] > LONGEST_LINE:
            yield Rejected(source, before + offset + 1, LINE_TOO_LONG)
        else:
            yield _parquet_row(batch.slice(offset, 1).cast(schema), source, before + offset + 1)


def _value_bytes(values: Any) -> Any:
    """Returns the size in bytes of each value of an Arrow array, with repeated ones written out."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = values.type
    if pa.types.is_dictionary(kind):
        return np.append(_value_bytes(values.dictionary), 0)[values.indices.fill_null(len(values.dictionary))]
    if pa.types.is_struct(kind):
        return sum(map(_value_bytes, values.flatten()), start=np.zeros(len(values), np.int64))
    if isinstance(values, pa.ListArray | pa.LargeListArray):  # also maps, lists of structs
        return np.diff(np.append(0, np.cumsum(_value_bytes(values.values)))[values.offsets])
    if kind in (pa.string(), pa.binary(), pa.large_string(), pa.large_binary()):
        return pc.binary_length(values).fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
    return np.full(len(values), max(8, values.nbytes // max(1, len(values))))


def _parquet_row(batch: Any, source: str, row: int) -> Raw | Rejected:
    try:
        return Raw(source, row, batch.to_pylist()[0])
    except UnicodeDecodeError:
        return Rejected(source, row, NOT_UTF8)
    except KeyError as error:
        return Rejected(source, row, f"not readable: unknown time zone: {_first_line(error)}")
    except (ValueError, OverflowError) as error:  # such as a date outside Python's years
        return Rejected(source, row, f"not readable: {_first_line(error)}")


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _seekable(path: DataFile, most: int) -> IO[bytes]:
    """Returns the file opened; an archive is unpacked into a temporary file, since Parquet is read from its end."""
    if path.suffix.lower() not in MAGIC:
        if not isinstance(path, RemoteFile):
            return path.open("rb")
        whole, pin = path.fetch()
        with pin:  # an open file stays readable after its eviction from the cache
            return whole.open("rb")
    file: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 -- the caller closes it
    with ByteStream(path) as stream:
        for block in stream.blocks(most, "decompress it: Parquet is compressed itself"):
            file.write(block)
        if stream.damage:
            raise UserError(Problem(stream.damage, file=str(path)))
    file.seek(0)
    return file
