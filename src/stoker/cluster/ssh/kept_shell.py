"""A shell on a host that stays open, and runs one script after another.

A new ssh command costs a login on the host, which may run a second of startup files.

What a script prints stands between two marks, random words that the shell prints before and after it. What comes
outside of them is dropped: texts of the login, and late output of processes that a script left behind.
"""

from __future__ import annotations

import os
import re
import resource
import secrets
import selectors
import shlex
import subprocess
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress

from stoker.cluster.shell import NO_ANSWER, Given, ShellFailed, ended, started

MOST = 64  # shells that one process keeps open
FILES = 12  # open files that the process may have for each of them; it takes three
LONGEST = 2**15  # bytes of a script and its input; the shell's own input takes them at once
GRACE = 0.5  # seconds in which ssh ends by itself after the end of its input
_kept: weakref.WeakSet[KeptShell] = weakref.WeakSet()


class NotRunError(ShellFailed):
    """The shell had ended before it read the script."""


class _Marked:
    """What comes of one output between two marks, the first of which may be empty."""

    def __init__(self, begin: bytes, end: bytes) -> None:
        self._begin, self._end = begin, end
        self.has_begun, self.code, self.text = not begin, -1, bytearray()

    def add(self, part: bytes) -> bool:
        """Adds bytes; returns whether the second mark has come."""
        looked = max(0, len(self.text) - len(self._end) - 8)
        self.text += part
        if not self.has_begun:
            at = self.text.find(self._begin)
            if at < 0:
                return False
            del self.text[: at + len(self._begin)]
            self.has_begun, looked = True, 0
        found = re.compile(self._end + rb" (\d+)\n").search(self.text, looked)
        if found is not None:
            self.code = int(found[1])
            del self.text[found.start() :]
        return found is not None


class KeptShell:
    """A `sh` that runs scripts.

    Args:
        words: what runs a command on the host, without the command.
        host: name of the host in messages.

    Attributes:
        is_ready: whether it has answered once.
    """

    def __init__(self, words: Sequence[str], host: str) -> None:
        self.is_ready = False
        self._host, self._ready = host, secrets.token_hex(16)
        begin = f"echo {self._ready} 0; echo {self._ready} 0 >&2; exec sh"
        self._process = started([*words, f"sh -c {shlex.quote(begin)}"], buffer=0)
        self._lock = threading.Lock()
        self._close = weakref.finalize(self, _end, self._process)
        _kept.add(self)

    @staticmethod
    def opened(words: Sequence[str], host: str) -> KeptShell | None:
        """Returns a new shell; None if this process keeps as many as it may, or has no ssh."""
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if len(_kept) >= (MOST if files == resource.RLIM_INFINITY else min(MOST, files // FILES)):
            return None
        try:
            return KeptShell(words, host)
        except OSError:
            return None

    @property
    def is_open(self) -> bool:
        """Returns whether the shell has not ended."""
        return self._process.poll() is None

    def close(self) -> None:
        """Ends the shell."""
        _kept.discard(self)
        self._close()

    def run(self, script: str, *, given: bytes = b"", timeout: float | None = None) -> bytes:
        """Runs a script that `takes` accepts; returns its standard output.

        Raises:
            NotRunError: the shell ended before it.
            ShellFailed: it ended with an error, or the shell did.
        """
        until = None if timeout is None else time.monotonic() + timeout
        begin, end = secrets.token_hex(16), secrets.token_hex(16)
        source = f"<<'{end}'\n".encode() + given + f"{end}\n".encode() if given else b"</dev/null\n"
        lines = [f"echo {begin}; echo {begin} >&2\nsh -c ".encode(), os.fsencode(shlex.quote(script)), b" ", source]
        lines.append(f"printf '%s %d\\n' {end} $?; echo {end} 0 >&2\n".encode())
        with self._lock:
            try:
                if not self.is_ready:  # what runs at a login may read its input
                    self._answer("", self._ready, until)
                    self.is_ready = True
                assert self._process.stdin is not None
                with suppress(BrokenPipeError):  # it has ended; what it said is the reason
                    self._process.stdin.write(b"".join(lines))
                return self._answer(begin, end, until)
            except TimeoutError:
                self.close()
                raise ShellFailed(self._host, NO_ANSWER, f"no answer within {timeout:g} s") from None
            except ShellFailed:
                raise
            except BaseException:  # what is left of the answer would be taken for that of the next script
                self.close()
                raise

    def _answer(self, begin: str, end: str, until: float | None) -> bytes:
        """Returns what stands between two marks on the standard output."""
        first = f"{begin}\n".encode() if begin else b""
        out, err = _Marked(first, end.encode()), _Marked(first, end.encode())
        assert self._process.stdout is not None and self._process.stderr is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ, out)
            selector.register(self._process.stderr, selectors.EVENT_READ, err)
            while selector.get_map():
                left = None if until is None else until - time.monotonic()
                ready = selector.select(left) if left is None or left > 0 else []
                if not ready:
                    raise TimeoutError
                for key, _ in ready:
                    part = os.read(key.fd, 2**16)
                    if key.data.add(part) or not part:
                        selector.unregister(key.fileobj)
        reason = err.text.decode(errors="replace")
        if out.code < 0:
            self.close()
            ran = bool(begin) and out.has_begun
            raise (ShellFailed if ran else NotRunError)(self._host, self._process.returncode, reason)
        if out.code:
            raise ShellFailed(self._host, out.code, reason)
        return bytes(out.text)


def takes(script: str, given: Given) -> bool:
    """Returns whether a kept shell can run a script: its input becomes lines of the shell's own."""
    if callable(given) or b"\0" in given or (given and not given.endswith(b"\n")):
        return False
    return len(os.fsencode(script)) + len(given) <= LONGEST


def _end(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    process.stdin.close()
    try:
        process.wait(GRACE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    process.stdout.close()
    process.stderr.close()
    ended(process)
