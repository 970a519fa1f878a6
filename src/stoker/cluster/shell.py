"""Runs scripts of the POSIX shell, here or on another host: what targets need of a machine."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from threading import Thread
from typing import IO, Protocol, TypeVar

from stoker.errors import RunFailed

T = TypeVar("T")
S = TypeVar("S")
Given = bytes | Callable[[IO[bytes]], None]
MOST_AT_ONCE = 32  # hosts that are talked to at the same time


class ShellFailed(RunFailed):
    """A script ended with an error, or its host could not be reached.

    Attributes:
        code: the exit code.
        said: what it wrote to standard error.
    """

    def __init__(self, host: str, code: int, said: str) -> None:
        self.code, self.said = code, said.strip()
        super().__init__(f"{host}: {self.said or f'a command ended with exit code {code}'}")


class Shell(Protocol):
    """Where scripts run."""

    @property
    def name(self) -> str:
        """The host, as messages call it."""

    def run(self, script: str, *, given: Given = b"", timeout: float | None = None) -> bytes:
        """What a script prints.

        Args:
            given: its standard input, or what writes it.
            timeout: seconds after which it counts as failed.

        Raises:
            ShellFailed: it ended with an error, or could not be run.
        """

    def copies(self) -> Sequence[str] | None:
        """The words of a command that copies a folder there, without source and destination; None without rsync."""

    def place(self, path: str) -> str:
        """A path there, as that command's destination."""


class LocalShell:
    """Scripts on this machine."""

    name = "this machine"

    def run(self, script: str, *, given: Given = b"", timeout: float | None = None) -> bytes:
        return finished(["sh", "-c", script], self.name, given, timeout)

    def copies(self) -> Sequence[str] | None:
        return None

    def place(self, path: str) -> str:
        return path


def finished(words: Sequence[str], host: str, given: Given, timeout: float | None) -> bytes:
    """What a command prints.

    Raises:
        ShellFailed: it ended with an error or is not there.
    """
    try:
        process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    except FileNotFoundError:
        raise ShellFailed(host, 127, f"there is no {words[0]} here") from None
    with process:
        try:
            if callable(given):
                assert process.stdin is not None
                stdin, process.stdin = process.stdin, None  # `communicate` leaves it to the thread
                writer = Thread(target=_write, args=(given, stdin), daemon=True)
                writer.start()
                out, said = process.communicate(timeout=timeout)
                writer.join()
            else:
                out, said = process.communicate(given, timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            raise ShellFailed(host, 124, f"no answer within {timeout:g} s") from None
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        raise ShellFailed(host, process.returncode, said.decode(errors="replace"))
    return out


def _write(given: Callable[[IO[bytes]], None], stdin: IO[bytes]) -> None:
    with suppress(BrokenPipeError), stdin:  # the command has ended, and its exit code says why
        given(stdin)


def on_all(shells: Sequence[S], do: Callable[[S], T]) -> list[T]:
    """What a function returns for each of several hosts, called on them at once.

    Raises:
        RunFailed: with the problems of every host.
    """
    if not shells:
        return []
    with ThreadPoolExecutor(min(len(shells), MOST_AT_ONCE)) as pool:
        futures = [pool.submit(do, shell) for shell in shells]
    failed = [error for future in futures if (error := future.exception()) is not None]
    for error in failed:
        if not isinstance(error, RunFailed):
            raise error
    if failed:
        raise RunFailed(*(problem for error in failed if isinstance(error, RunFailed) for problem in error.problems))
    return [future.result() for future in futures]
