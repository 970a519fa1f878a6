"""Servers of the chat that are begun by several requests at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from stoker.page.chat_servers import MOST, ChatServers
from stoker.page.page_error import PageError
from stoker.page.routes.chat_routes import newest_weights


class Process:
    """A process that never finishes loading."""

    returncode: int | None = None
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


def test_a_run_that_was_trained_on_is_loaded_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    processes: list[Process] = []

    async def begin(*_: Any, **__: Any) -> Process:
        processes.append(Process())
        return processes[-1]

    async def talk() -> list[int]:
        servers, begun = ChatServers(tmp_path, tmp_path), []
        talking = servers.answer("one", "one", adapter=True, messages=[], weights="step 5")
        await anext(talking)
        for weights in ("step 5", "step 9"):  # the second one comes while the first is being answered
            other = servers.answer("one", "one", adapter=True, messages=[], weights=weights)
            await anext(other)
            await other.aclose()
            begun.append(len(processes))
        await talking.aclose()
        for weights in ("step 9", "step 9"):
            other = servers.answer("one", "one", adapter=True, messages=[], weights=weights)
            await anext(other)
            await other.aclose()
            begun.append(len(processes))
        return begun

    monkeypatch.setattr(asyncio, "create_subprocess_exec", begin)
    assert asyncio.run(talk()) == [1, 1, 2, 2]


def test_a_server_that_ended_by_itself_makes_room_for_its_successor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes: list[Process] = []

    async def begin(*_: Any, **__: Any) -> Process:
        processes.append(Process())
        return processes[-1]

    async def talk() -> None:
        servers = ChatServers(tmp_path, tmp_path)
        asked = [servers.answer(str(run), str(run), adapter=True, messages=[]) for run in range(MOST)]
        for answers in asked:
            await anext(answers)
        processes[0].returncode = 1
        assert await anext(servers.answer("0", "0", adapter=True, messages=[])) == {"status": "loading"}

    monkeypatch.setattr(asyncio, "create_subprocess_exec", begin)
    asyncio.run(talk())
    assert len(processes) == MOST + 1


def test_the_newest_weights_are_those_of_the_newest_checkpoint() -> None:
    started = {"event": "started", "time": 1.0}
    saved = {"event": "saved", "step": 5, "time": 2.0, "where": "disk"}
    copied = {"event": "saved", "step": 6, "time": 3.0, "where": "memory"}
    names = [newest_weights(events) for events in ([started], [started, saved], [started, saved, copied])]
    assert names[0] != names[1] == names[2]
    assert newest_weights([{**started, "time": 9.0}]) != names[0]
