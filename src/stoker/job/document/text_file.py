"""The text of a job file, or of another small file that the user names."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

from stoker.errors import Problem, UserError, did_you_mean

LARGEST_FILE = 256 * 1024  # bytes; the pure-Python parser reads about 128 KiB a second
STREAMS = ("/dev/", "/proc/")  # a FIFO here is written by a shell: `stoker check <(generate)`
_read_streams: dict[tuple[int, int], bytes] = {}  # by device and inode: a pipe has its content only once
DATA_FILE = re.compile(r"\.(jsonl|ndjson|csv|tsv|parquet|arrow)(\.(gz|bz2|xz|zst))?$", re.IGNORECASE)


def read_text(path: str | Path) -> str:
    """Returns the file's text. Raises UserError for a missing or huge file, a folder, or bytes that are not UTF-8."""
    file, path = str(path), Path(path)
    try:
        state = path.stat()
        if path.is_dir():
            inner = path / "job.yaml"
            hint = f"name a file in it, such as {inner}" if inner.is_file() else "name the job file itself"
            raise UserError(Problem("this is a folder, not a job file", hint, file=file))
        if DATA_FILE.search(path.name):
            message = "this is a data file, not a job or a configuration"
            raise UserError(Problem(message, "give a data file as `data:` of a job", file=file))
        if path.is_fifo() and not file.startswith(STREAMS):
            raise UserError(Problem("this is a FIFO, not a file", "name the job file itself", file=file))
        raw = _content(path, state)
        if len(raw) > LARGEST_FILE:
            message = (
                f"the file has {max(state.st_size, len(raw)):,} bytes, and a job file has at most {LARGEST_FILE:,}"
            )
            raise UserError(Problem(message, "a job is a few lines; give data by its path under `data:`", file=file))
    except OSError as error:
        missing = isinstance(error, FileNotFoundError)
        message = "there is no such file" if missing else f"cannot be read ({error.strerror or error})"
        hint = (_nearest_file(path) or "write one with `stoker new`") if missing else ""
        raise UserError(Problem(message, hint, file=file)) from error
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        column = len(raw[raw.rfind(b"\n", 0, error.start) + 1 : error.start].decode("utf-8", "replace")) + 1
        message = f"byte 0x{raw[error.start]:02x} is not UTF-8"
        raise UserError(Problem(message, "save the file as UTF-8", file=file, line=line, column=column)) from error


def _content(path: Path, state: os.stat_result) -> bytes:
    """Returns the beginning of a file; that of a pipe is kept, as a command reads its job more than once."""
    key = (state.st_dev, state.st_ino)
    if key in _read_streams and not stat.S_ISREG(state.st_mode):
        return _read_streams[key]
    with path.open("rb") as opened:
        raw = opened.read(LARGEST_FILE + 1)  # a device has no size and perhaps no end
    if raw and not stat.S_ISREG(state.st_mode):
        _read_streams[key] = raw
    return raw


def _nearest_file(path: Path) -> str:
    """Returns a suggestion of the file in the same folder with the nearest name; empty if there is none."""
    try:
        names = [each.name for each in path.parent.iterdir() if each.is_file()]
    except OSError:
        return ""
    return did_you_mean(path.name, names, 0.7)
