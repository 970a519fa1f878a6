"""Runs a verb of `stoker` as a process and reads its JSON."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stoker.page.page_error import http_error

AT_ONCE = 3  # concurrent processes for answers, without training
WAITING = 64  # maximum of requests that wait for one of them
MOST = 256 << 20  # maximum of output bytes that are read


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
    def last_line(self) -> str:
        """The last line that it wrote to stderr, without its `error:`."""
        lines = [line for line in self.errors.splitlines() if line.strip()] or ["it says nothing"]
        return lines[-1].removeprefix("error: ")[:500]


def command_of(arguments: Sequence[str]) -> list[str]:
    """Returns the command line that starts a verb in this installation."""
    return [sys.executable, "-m", "stoker", *arguments]


def environment() -> dict[str, str]:
    """Returns the environment of verbs, without a terminal."""
    return {**os.environ, "NO_COLOR": "1", "TERM": "dumb", "PYTHONUNBUFFERED": "1", "PYTHONSAFEPATH": "1"}


class Verbs:
    """Starts verbs, a few at a time."""

    def __init__(self, base: Path) -> None:
        self._base = base
        self._room = asyncio.Semaphore(AT_ONCE)
        self._asked = 0

    async def run(
        self, arguments: Sequence[str], *, seconds: float, cwd: Path | None = None, env: Mapping[str, str] | None = None
    ) -> VerbResult:
        """Runs a verb to its end; ends it with its children after a timeout, or if the client disconnects.

        Raises:
            PageError: it timed out, or too many requests wait already.
        """
        if self._asked >= WAITING:
            raise http_error(429, "the page is busy", retry_after=5)
        self._asked += 1
        try:
            async with self._room:
                return await self._run(arguments, seconds, cwd or self._base, dict(env or {}))
        finally:
            self._asked -= 1

    async def _run(self, arguments: Sequence[str], seconds: float, cwd: Path, env: dict[str, str]) -> VerbResult:
        process = await asyncio.create_subprocess_exec(
            *command_of(arguments),
            cwd=cwd,
            env=environment() | env,
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
        return VerbResult(process.returncode, _json_of(out[:MOST]), errors.decode("utf-8", "replace"))


def _json_of(out: bytes) -> Any:
    """Returns the JSON of an output: all of it, or its last line that is some."""
    try:
        return json.loads(out)
    except ValueError:
        pass
    for line in reversed(out.splitlines()):
        try:
            return json.loads(line)
        except ValueError:
            continue
    return None
