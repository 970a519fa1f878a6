"""Runs scripts of the POSIX shell, here or on another host: the interface of targets to a machine."""

from __future__ import annotations

import shlex
import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from threading import Thread
from typing import IO, Protocol, TypeVar

from stoker.errors import RunFailed

T = TypeVar("T")
S = TypeVar("S")
Given = bytes | Callable[[IO[bytes]], None]
NO_ANSWER = 124  # exit code of a command that took too long
MOST_AT_ONCE = 32  # hosts that are talked to at the same time
POLL = 0.05  # seconds
_commands: set[subprocess.Popen[bytes]] = set()  # that run


class ShellFailed(RunFailed):
    """A script ended with an error, or its host could not be reached.

    Attributes:
        code: the exit code.
        stderr: its standard error.
    """

    def __init__(self, host: str, code: int, stderr: str) -> None:
        self.code, self.stderr = code, stderr.strip()
        super().__init__(f"{host}: {self.stderr or f'a command ended with exit code {code}'}")


class Shell(Protocol):
    """A machine that runs scripts."""

    @property
    def name(self) -> str:
        """The host's name in messages."""

    def words(self, script: str) -> list[str]:
        """Returns the command that runs a script there."""

    def run(self, script: str, *, given: Given = b"", timeout: float | None = None) -> bytes:
        """Runs a script; returns its standard output.

        Args:
            given: its standard input, or a function that writes it.
            timeout: seconds after which it counts as failed.

        Raises:
            ShellFailed: it ended with an error, or could not be run.
        """


class LocalShell:
    """Scripts on this machine."""

    name = "this machine"

    def words(self, script: str) -> list[str]:
        return ["sh", "-c", script]

    def run(self, script: str, *, given: Given = b"", timeout: float | None = None) -> bytes:
        return finished(self.words(script), self.name, given, timeout)


def started(words: Sequence[str], *, buffer: int = -1) -> subprocess.Popen[bytes]:
    """Starts a command with pipes. A Ctrl-C in the terminal does not reach it: this process decides what it ends."""
    pipe = subprocess.PIPE
    process = subprocess.Popen(words, buffer, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)
    _commands.add(process)
    return process


def ended(process: subprocess.Popen[bytes]) -> None:
    """Notes that a command of `started` has ended."""
    _commands.discard(process)


def finished(words: Sequence[str], host: str, given: Given, timeout: float | None) -> bytes:
    """Runs a command to its end; returns its standard output.

    Raises:
        ShellFailed: it ended with an error or does not exist.
    """
    try:
        process = started(words)
    except FileNotFoundError:
        raise ShellFailed(host, 127, f"there is no {words[0]} here") from None
    with process:
        try:
            if callable(given):
                assert process.stdin is not None
                stdin, process.stdin = process.stdin, None  # keeps `communicate` from closing it
                writer = Thread(target=_write, args=(given, stdin), daemon=True)
                writer.start()
                out, stderr = process.communicate(timeout=timeout)
                writer.join()
            else:
                out, stderr = process.communicate(given, timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            raise ShellFailed(host, NO_ANSWER, f"no answer within {timeout:g} s") from None
        except BaseException:
            process.kill()
            raise
        finally:
            ended(process)
    if process.returncode:
        raise ShellFailed(host, process.returncode, stderr.decode(errors="replace"))
    return out


def _write(given: Callable[[IO[bytes]], None], stdin: IO[bytes]) -> None:
    with suppress(BrokenPipeError), stdin:  # the command has ended, and its exit code gives the reason
        given(stdin)


def on_all(shells: Sequence[S], do: Callable[[S], T]) -> list[T]:
    """Calls a function for several hosts concurrently; returns its results in order. An interrupt ends its commands.

    Raises:
        RunFailed: with the problems of every host.
    """
    if not shells:
        return []
    pool = ThreadPoolExecutor(min(len(shells), MOST_AT_ONCE))
    futures = [pool.submit(do, shell) for shell in shells]
    try:
        wait(futures)
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        while not all(future.done() for future in futures):  # the interpreter waits for the threads at its end
            for process in _commands.copy():
                process.kill()
            time.sleep(POLL)
        raise
    pool.shutdown()
    failed = [error for future in futures if (error := future.exception()) is not None]
    for error in failed:
        if not isinstance(error, RunFailed):
            raise error
    if failed:
        raise RunFailed(*(problem for error in failed if isinstance(error, RunFailed) for problem in error.problems))
    return [future.result() for future in futures]


def quoted(folder: str) -> str:
    """Quotes a folder for the shell; a path that begins with ``~/`` or without a slash is in the user's home."""
    if folder.startswith("/"):
        return shlex.quote(folder)
    rest = folder.removeprefix("~/") if folder != "~" else ""
    return f'"$HOME"/{shlex.quote(rest)}' if rest else '"$HOME"'


def python_word(python: str) -> str:
    """Quotes the target's Python for the shell; ``~/`` is the user's home on the target."""
    return f'"$HOME"/{shlex.quote(python[2:])}' if python.startswith("~/") else shlex.quote(python)
