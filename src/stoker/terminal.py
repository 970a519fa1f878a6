"""Standard output and standard error: text of other people's cannot steer a terminal, a full disk is a clear error."""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from stoker.errors import RunFailed, reason_of

# Control characters but line feed and tab (C0, DEL, C1), what turns or breaks lines (Unicode's bidirectional marks and
# separators), and halves of surrogate pairs, which no encoding has.
_STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


SHOW_CURSOR = "\x1b[?25h"


def escape_control_characters(text: str) -> str:
    """Escapes control characters of a text, in the notation of JSON and YAML."""
    return _STEERING.sub(_escaped, text)


def _escaped(found: re.Match[str]) -> str:
    code = ord(found[0])  # JSON has no \x, and escapes all of C0 itself
    return f"\\x{code:02x}" if code < 0x20 else f"\\u{code:04x}"


class Output:
    """A stream of text as `print` and others write to it.

    Attributes:
        unescaped: the same without escaping, for what Stoker itself writes to steer the terminal.
    """

    def __init__(self, stream: Any, *, escapes: bool = True, silent: bool = False, needs_reader: bool = True) -> None:
        """Wraps a stream.

        Args:
            silent: ignore errors; for the stream that errors are reported on.
            needs_reader: raise an error if nobody reads any more.
        """
        self._stream, self._escapes, self._silent, self._needs_reader = stream, escapes, silent, needs_reader
        self.unescaped = Output(stream, escapes=False, silent=silent, needs_reader=needs_reader) if escapes else self

    def write(self, text: str) -> int:
        """Writes the text.

        Raises:
            BrokenPipeError: nobody reads any more, and the stream needs a reader.
            RunFailed: it cannot be written for another reason, such as a full disk.
        """
        with self._failing_in_words():
            self._stream.write(escape_control_characters(text) if self._escapes else text)
        return len(text)

    def flush(self) -> None:
        """See `write`."""
        with self._failing_in_words():
            self._stream.flush()

    @contextmanager
    def _failing_in_words(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno in (errno.EPIPE, errno.EIO):  # EIO: the terminal has been closed
                if self._needs_reader and not self._silent:
                    raise BrokenPipeError(errno.EPIPE, "nobody reads standard output") from error
            elif not self._silent:
                raise RunFailed(f"standard output cannot be written: {error.strerror or reason_of(error)}") from error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def unwrapped(stream: Any) -> Any:
    """Returns the stream that an `Output` writes to."""
    return stream._stream if isinstance(stream, Output) else stream


def unescaped(stream: Any) -> Any:
    """Returns the stream for text that contains terminal control sequences."""
    return getattr(stream, "unescaped", stream)


def show_cursor(stream: Any) -> None:
    """Shows the cursor of a terminal that the live line of a killed process had hidden."""
    if stream.isatty():
        unescaped(stream).write(SHOW_CURSOR)
        stream.flush()


@contextmanager
def escaped_output(*, needs_reader: bool) -> Iterator[None]:
    """Everything printed inside of the block goes through `Output`."""
    _open_closed_descriptors()
    before = sys.stdout, sys.stderr
    sys.stdout = Output(_usable(before[0]), needs_reader=needs_reader)
    sys.stderr = Output(_usable(before[1]), silent=True)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def give_up_output() -> None:
    """Drops unwritten output, so that a failed flush at exit does not change the process' exit code."""
    for stream in (sys.stdout, sys.stderr):
        try:
            unwrapped(stream).flush()
        except OSError:  # said already, or there is nobody to say it to
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, stream.fileno())
            os.close(nothing)


def _open_closed_descriptors() -> None:
    """Opens the null device as each standard stream that the caller closed (``stoker train job.yaml >&-``).

    The next file to be opened would otherwise get its number, and child processes need all three.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number
    if sys.stdin is None:
        sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)


def _usable(stream: Any) -> Any:
    """Returns the stream with unencodable characters escaped; a null device if the process has no such stream."""
    if stream is None:
        return open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123 -- lives as long as the process
    if hasattr(stream, "reconfigure"):
        stream.reconfigure(errors="backslashreplace")  # an encoding such as ASCII does not have them all
    return stream
