"""The folder of this machine's caches."""

from __future__ import annotations

import os
import re
from pathlib import Path

from stoker.errors import Problem, RunFailed

ADVICE = "set STOKER_CACHE to a folder that can be written"


def cache_folder() -> Path:
    """Returns $STOKER_CACHE, $XDG_CACHE_HOME/stoker or ~/.cache/stoker.

    Raises:
        RunFailed: none of them exists.
    """
    if own := os.environ.get("STOKER_CACHE"):
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(shared) if shared else Path("~/.cache").expanduser()) / "stoker"
    except RuntimeError as error:
        raise RunFailed(Problem("there is no home folder to keep a cache in", ADVICE)) from error


def device_file(kind: str, device: str, threads: int) -> Path:
    """Returns the cache file of a device; for a processor, with its number of threads."""
    name = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    return cache_folder() / kind / (f"{name}-{threads}-threads.json" if threads else f"{name}.json")
