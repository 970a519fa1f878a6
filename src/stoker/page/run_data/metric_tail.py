"""Reads only the newest lines of a run's metrics, for lists of many runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from stoker.files import no_link
from stoker.json_values import json_or_none

TAIL = 64 << 10  # bytes of a file that are read


def newest_lines(path: Path, count: int) -> list[dict[str, Any]]:
    """Returns the last complete lines of a file, the newest last; fewer if they are long, none without a file."""
    try:
        with open(path, "rb", opener=no_link) as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - TAIL))
            lines = file.read().split(b"\n")
    except OSError:
        return []
    whole = lines[1 if size > TAIL else 0 : -1]  # the last one may be being written
    return [values for line in whole[-count:] if isinstance(values := json_or_none(line), dict)]
