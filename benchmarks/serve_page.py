"""`stoker ui` for those who change the page: started again whenever a Python file of it changes; `make ui-dev`."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

ROOM = Path(__file__).parents[1] / "src/stoker/page"
POLL = 0.5  # seconds


def newest() -> float:
    """When a Python file of the page last changed."""
    return max(path.stat().st_mtime for path in ROOM.glob("*.py"))


def main() -> None:
    """Serves until Ctrl-C; arguments are those of `stoker ui`."""
    arguments = sys.argv[1:] or ["--port", "8765"]
    while True:
        begun = newest()
        server = subprocess.Popen([sys.executable, "-m", "stoker", "ui", *arguments])
        try:
            while newest() == begun and server.poll() is None:
                time.sleep(POLL)
            while server.poll() is not None and newest() == begun:  # an error: wait for its mending
                time.sleep(POLL)
        except KeyboardInterrupt:
            return
        finally:
            server.terminate()
            server.wait()


if __name__ == "__main__":
    main()
