"""Servers of the chat that are begun by several requests at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from stoker.page.chat_servers import MOST, ChatServers
from stoker.page.page_error import PageError


class Process:
    """A process that loads for ever."""

    returncode = None
    stdin = None

    def __init__(self) -> None:
        self.stdout = asyncio.StreamReader()


@pytest.mark.parametrize(
    ("runs", "begun", "refused"), [(["one"] * 4, 1, 0), ([f"run-{number}" for number in range(MOST + 2)], MOST, 2)]
)
def test_requests_at_once_share_a_server_and_its_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runs: list[str], begun: int, refused: int
) -> None:
    processes: list[Process] = []

    async def begin(*_: Any, **__: Any) -> Process:
        await asyncio.sleep(0.01)
        processes.append(Process())
        return processes[-1]

    async def first(answers: AsyncIterator[dict[str, Any]]) -> Any:
        try:
            return await anext(answers)
        except PageError as error:
            return error.status

    async def talk() -> list[Any]:
        servers = ChatServers(tmp_path, tmp_path)
        asked = [servers.answer(run, run, adapter=True, messages=[]) for run in runs]
        return await asyncio.gather(*(first(answers) for answers in asked))

    monkeypatch.setattr(asyncio, "create_subprocess_exec", begin)
    found = asyncio.run(talk())
    assert len(processes) == begun
    assert found.count({"status": "loading"}) == len(runs) - refused and found.count(429) == refused
