"""A shell on a host that stays open, and runs one script after another.

A new ssh command costs a login on the host, which may run a second of startup files.
"""

from __future__ import annotations

import os
import re
import secrets
import selectors
import shlex
import subprocess
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress

from stoker.cluster.shell import Given, ShellFailed

MOST = 64  # shells that one process keeps open; each takes three of its open files
LONGEST = 2**15  # bytes of a script and its input; the shell's own input takes them at once
_free = threading.BoundedSemaphore(MOST)


class KeptShell:
    """A `sh` that runs scripts.

    Args:
        words: the command that starts it.
        host: name of the host in messages.
    """

    def __init__(self, words: Sequence[str], host: str) -> None:
        self._host = host
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0)
        self._lock = threading.Lock()
        self._close = weakref.finalize(self, _end, self._process)

    @staticmethod
    def opened(words: Sequence[str], host: str) -> KeptShell | None:
        """Returns a new shell; None if this process has as many as it may keep, or has no ssh."""
        if not _free.acquire(blocking=False):
            return None
        try:
            return KeptShell(words, host)
        except OSError:
            _free.release()
            return None

    @property
    def is_open(self) -> bool:
        """Returns whether the shell has not ended."""
        return self._process.poll() is None

    def close(self) -> None:
        """Ends the shell."""
        self._close()

    def run(self, script: str, *, given: bytes = b"", timeout: float | None = None) -> bytes:
        """Runs a script that `takes` accepts; returns its standard output.

        Raises:
            ShellFailed: it ended with an error, or the shell did.
        """
        mark = secrets.token_hex(16)
        source = f"<<'{mark}'\n".encode() + given + f"{mark}\n".encode() if given else b"</dev/null\n"
        told = f"stoker=$?; printf '%s %d\\n' {mark} $stoker; echo {mark} >&2\n"
        with self._lock:
            assert self._process.stdin is not None
            try:
                with suppress(BrokenPipeError):  # it has ended; what it said is the reason
                    self._process.stdin.write(f"sh -c {shlex.quote(script)} ".encode() + source + told.encode())
                out, said = self._answer(mark.encode(), timeout)
            except BaseException:  # what is left of the answer would be taken for that of the next script
                self.close()
                raise
        found = re.search(mark.encode() + rb" (\d+)\n$", out)
        words = said.removesuffix(f"{mark}\n".encode()).decode(errors="replace")
        if found is None:
            raise ShellFailed(self._host, self._process.wait(), words)
        if found[1] != b"0":
            raise ShellFailed(self._host, int(found[1]), words)
        return out[: found.start()]

    def _answer(self, mark: bytes, timeout: float | None) -> tuple[bytes, bytes]:
        """Reads both outputs until each has the mark, or ends."""
        assert self._process.stdout is not None and self._process.stderr is not None
        until = None if timeout is None else time.monotonic() + timeout
        answer, reason = bytearray(), bytearray()
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ, answer)
            selector.register(self._process.stderr, selectors.EVENT_READ, reason)
            while selector.get_map():
                left = None if until is None else until - time.monotonic()
                ready = selector.select(left) if left is None or left > 0 else []
                if not ready:
                    raise ShellFailed(self._host, 124, f"no answer within {timeout:g} s")
                for key, _ in ready:
                    part, text = os.read(key.fd, 2**16), key.data
                    text += part
                    if not part or (mark in text[-len(mark) - 8 :] and text.endswith(b"\n")):
                        selector.unregister(key.fileobj)
        return bytes(answer), bytes(reason)


def takes(script: str, given: Given) -> bool:
    """Returns whether a kept shell can run a script: its input becomes lines of the shell's own."""
    if callable(given) or b"\0" in given or (given and not given.endswith(b"\n")):
        return False
    return len(script.encode()) + len(given) <= LONGEST


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout, process.stderr):
        assert stream is not None
        stream.close()
    _free.release()
