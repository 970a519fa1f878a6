"""Where this machine keeps what can be made again."""

from __future__ import annotations

import os
from pathlib import Path

from stoker.errors import Problem, RunFailed

ADVICE = "set STOKER_CACHE to a folder that can be written"


def cache_folder() -> Path:
    """$STOKER_CACHE, $XDG_CACHE_HOME/stoker or ~/.cache/stoker.

    Raises:
        RunFailed: there is none of them.
    """
    if own := os.environ.get("STOKER_CACHE"):
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(shared) if shared else Path("~/.cache").expanduser()) / "stoker"
    except RuntimeError as error:
        raise RunFailed(Problem("there is no home folder to keep a cache in", ADVICE)) from error
