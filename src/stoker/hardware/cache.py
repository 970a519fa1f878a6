"""Where this machine keeps what can be made again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """$STOKER_CACHE, $XDG_CACHE_HOME/stoker or ~/.cache/stoker."""
    if own := os.environ.get("STOKER_CACHE"):
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path("~/.cache").expanduser()) / "stoker"
