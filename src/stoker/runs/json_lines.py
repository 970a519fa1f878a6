"""Files of JSON Lines that are appended to while others read them."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from stoker.errors import DiskFailed, UserError
from stoker.files import no_link, open_regular
from stoker.json_values import json_or_none
from stoker.runs.line_batches import line_batches


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turns errors of the disk into `DiskFailed`."""
    try:
        yield
    except OSError as error:
        raise DiskFailed(
            f"{path} cannot be written ({error.strerror}); earlier checkpoints are untouched. "
            "Make room and run the same command to continue"
        ) from error


def line_of(values: Mapping[str, Any]) -> str:
    """Returns a line of JSON; numbers without a JSON form (infinity after an overflow) are null."""
    plain = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
    return json.dumps(plain, ensure_ascii=False) + "\n"


def _ends_in_newline(file: IO[bytes]) -> bool:
    file.seek(-1, os.SEEK_END)
    return file.read(1) == b"\n"


def append_line(path: Path, value: Mapping[str, Any]) -> None:
    """Appends an object to a JSON Lines file."""
    with disk_errors(path), open(path, "a+b", opener=no_link) as file:
        if file.tell() and not _ends_in_newline(file):  # a killed process left half a line
            file.write(b"\n")
        file.write(line_of(value).encode())


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the objects of a JSON Lines file; an unfinished last line of a killed process is skipped, as are lines
    longer than `line_batches` allows.

    Raises:
        UserError: the file cannot be read.
    """
    try:
        with open(path, "rb", opener=open_regular) as file:
            for lines, _ in line_batches(file, unfinished=True):
                yield from (value for line in lines if isinstance(value := json_or_none(line), dict))
    except FileNotFoundError:
        return
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
