"""The process that writes checkpoints while training goes on, as the training process speaks to it."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from dataclasses import asdict
from typing import Any

from stoker.checkpoint.writer import WriteRequest
from stoker.runs.shm_folder import SharedFolder

ENDS = 600.0  # seconds that a writer gets to finish when its process ends


class Background:
    """A background writer, in a session of its own: signals of a terminal do not reach it.

    Args:
        own: a folder that it holds, too, and removes when it ends; None where that is left to others.
    """

    def __init__(self, own: SharedFolder | None) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "stoker.checkpoint.writer", *([str(own.path)] if own is not None else [])],
            pass_fds=[own.lock] if own is not None and own.lock is not None else [],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            bufsize=0,
        )
        self._rest = b""

    @property
    def pid(self) -> int:
        return self.process.pid

    def is_alive(self) -> bool:
        return self.process.poll() is None

    def ask(self, request: WriteRequest) -> None:
        self._send(json.dumps(asdict(request)).encode())

    def give_up(self) -> None:
        """Whatever checkpoint it is waiting for is not committed."""
        self._send(b"give up")

    def _send(self, line: bytes) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(line + b"\n")
        except BrokenPipeError:  # that it has died is told by `Staging.answer`
            self.process.wait()

    def answers(self, timeout: float | None) -> list[dict[str, Any]]:
        """What it has said since; waits for the first word, or until it has died."""
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], timeout)[0]:
            return []
        data = os.read(self.process.stdout.fileno(), 1 << 20)
        if not data:
            self.process.wait()
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def kill(self) -> None:
        """Ends it at once."""
        self.process.kill()
        self.process.wait()

    def close(self, *, wait: bool) -> None:
        """Lets it end, once it has finished what it is at."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        if wait:
            self.process.wait(ENDS)
