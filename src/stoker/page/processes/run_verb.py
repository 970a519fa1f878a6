"""Runs a verb of `stoker` as a process and reads its JSON."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stoker.page.page_error import http_error

AT_ONCE = 3  # concurrent processes for answers, without training
WAITING = 64  # maximum of requests that wait for one of them
MOST = 256 << 20  # maximum of output bytes that are read
# Variables of commands that run without a terminal.
WITHOUT_TERMINAL = {"NO_COLOR": "1", "TERM": "dumb", "PYTHONUNBUFFERED": "1", "PYTHONSAFEPATH": "1"}


@dataclass(frozen=True)
class VerbResult:
    """The result of a verb.

    Attributes:
        code: its exit code.
        answer: its JSON; None if it printed none.
    """

    code: int
    answer: Any
    errors: str

    @property
    def fields(self) -> dict[str, Any]:
        """Its JSON object; empty if it printed none."""
        return self.answer if isinstance(self.answer, dict) else {}

    @property
    def last_line(self) -> str:
        """The last line that it wrote to stderr, without its `error:`."""
        lines = [line for line in self.errors.splitlines() if line.strip()] or ["it says nothing"]
        return lines[-1].removeprefix("error: ")[:500]


def command_of(arguments: Sequence[str]) -> list[str]:
    """Returns the command line that starts a verb in this installation."""
    return [sys.executable, "-m", "stoker", *arguments]


class Verbs:
    """Starts verbs, a few at a time."""

    def __init__(self, base: Path) -> None:
        self._base = base
        self._room = asyncio.Semaphore(AT_ONCE)
        self._asked = 0

    async def run(self, arguments: Sequence[str], *, seconds: float, cwd: Path | None = None) -> VerbResult:
        """Runs a verb to its end; ends it with its children after a timeout, or if the client disconnects.

        Raises:
            PageError: it timed out, or too many requests wait already.
        """
        if self._asked >= WAITING:
            raise http_error(429, "the page is busy", retry_after=5)
        self._asked += 1
        try:
            async with self._room:
                return await self._run(arguments, seconds, cwd or self._base)
        finally:
            self._asked -= 1

    async def _run(self, arguments: Sequence[str], seconds: float, cwd: Path) -> VerbResult:
        process = await asyncio.create_subprocess_exec(
            *command_of(arguments),
            cwd=cwd,
            env={**os.environ, **WITHOUT_TERMINAL},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(seconds):
                out, errors = await process.communicate()
        except TimeoutError:
            what = "`stoker {verb}` took more than {seconds} s"
            raise http_error(504, what, verb=arguments[0], seconds=seconds) from None
        finally:
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
        assert process.returncode is not None
        answer = printed_json(out[:MOST].decode("utf-8", "replace"))
        return VerbResult(process.returncode, answer, errors.decode("utf-8", "replace"))


def printed_json(out: str) -> Any:
    """Parses an output as JSON: the whole output, or else its last line that is JSON; None if there is no such line."""
    for text in (out, *reversed(out.split("\n"))):
        with suppress(ValueError):
            return json.loads(text)
    return None
