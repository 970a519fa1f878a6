"""Runs a command that ends with the process that started it: its standard input is a pipe that then closes.

`python -m stoker.page.processes.end_with_parent COMMAND ...` also ends when the command does, with its exit code.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress

PATIENCE = 10.0  # seconds between asking a command to end and ending it


def run(command: list[str]) -> int:
    """Runs a command until it ends, or standard input does."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)

    def watch() -> None:
        while os.read(0, 4096):
            pass
        process.terminate()
        try:
            process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()
    return process.wait()


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
