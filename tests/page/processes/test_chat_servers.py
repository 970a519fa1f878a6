"""Servers of the chat: which are begun and ended, and what is not passed on to them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from browsing import Browser, make_run

from stoker.page.page_error import PageError
from stoker.page.processes import chat_servers
from stoker.page.processes.chat_servers import MOST, ChatServers, clean_up
from stoker.page.routes.chat_routes import newest_weights
from stoker.page.run_data.run_index import id_of


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


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[Process]:
    """The processes that were started."""
    processes: list[Process] = []

    async def begin(*_: Any, **__: Any) -> Process:
        processes.append(Process())
        return processes[-1]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", begin)
    return processes


def test_the_model_that_was_used_longest_ago_makes_room(tmp_path: Path, begun: list[Process]) -> None:
    async def talk() -> list[str]:
        servers = ChatServers(tmp_path, tmp_path)
        for run in ("0", *map(str, range(1, MOST)), "0", "new"):
            answers = servers.answer(run, run, adapter=True, messages=[])
            await anext(answers)
            await answers.aclose()
        return list(servers._servers)

    assert asyncio.run(talk()) == ["0", *map(str, range(2, MOST)), "new"]


def test_only_idle_models_leave_memory(tmp_path: Path, begun: list[Process], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_servers, "IDLE", 0.0)
    monkeypatch.setattr(chat_servers, "LOOK_EVERY", 0.01)

    async def talk() -> list[str]:
        servers = ChatServers(tmp_path, tmp_path)
        busy, idle = (servers.answer(run, run, adapter=True, messages=[]) for run in ("busy", "idle"))
        await anext(busy)
        await anext(idle)
        await idle.aclose()
        await asyncio.sleep(0.1)
        return list(servers._servers)

    assert asyncio.run(talk()) == ["busy"]


def test_a_servers_token_is_its_owners_and_gone_once_it_listens(tmp_path: Path, begun: list[Process]) -> None:
    async def talk() -> None:
        servers = ChatServers(tmp_path, tmp_path)
        await anext(servers.answer("one", "one", adapter=True, messages=[]))
        (secret,) = (tmp_path / "chat").glob("*.token")
        server = servers._servers["one"]
        assert secret.read_text() == server.token and secret.stat().st_mode & 0o777 == 0o600
        begun[0].stdout.feed_data(b"models: one, base\nlistening on http://127.0.0.1:9\n")
        assert server.ready is not None
        await server.ready
        assert (server.models, server.url) == (["one", "base"], "http://127.0.0.1:9")
        assert not secret.exists()

    asyncio.run(talk())


def test_what_earlier_servers_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / "chat").mkdir()
    for name in ("a.token", "a.err", "notes.txt"):
        (tmp_path / "chat" / name).touch()
    clean_up(tmp_path)
    assert [path.name for path in (tmp_path / "chat").iterdir()] == ["notes.txt"]


@pytest.fixture
def chat(page: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Browser:
    """A page with a run, whose chat starts no server."""

    async def answer(*_: Any, **__: Any) -> AsyncIterator[dict[str, Any]]:
        yield {"done": True}

    monkeypatch.setattr(ChatServers, "answer", answer)
    make_run(tmp_path / "runs" / "one")
    page.page.runs.forget()
    return page


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -0.1},
        {"temperature": 2.1},
        {"temperature": True},
        {"max_tokens": 0},
        {"max_tokens": 8193},
        {"adapter": "yes"},
        {"messages": []},
        {"messages": [{"role": "user", "content": "a"}] * 1001},
        {"messages": [{"role": "tool", "content": "a"}]},
        {"messages": [{"role": "user", "content": 5}]},
    ],
)
def test_what_is_no_conversation_is_refused(chat: Browser, tmp_path: Path, wrong: dict[str, Any]) -> None:
    asked = {"run": id_of(tmp_path / "runs" / "one"), "messages": [{"role": "user", "content": "a"}]}
    assert chat.post("/api/chat", {**asked, "temperature": 2.0, "max_tokens": 8192}).status_code == 200
    assert chat.post("/api/chat", {**asked, **wrong}).status_code == 400
    assert [line["action"] for line in chat.page.audit.lines()] == ["chat"]


@pytest.mark.parametrize("key", ["trust_remote_code", "allow_pickle"])
def test_a_run_whose_job_runs_code_is_not_opened(chat: Browser, tmp_path: Path, key: str) -> None:
    job = f"task: sft\nmodel: {{name: llama-3m, {key}: true}}\ndata: chatterbot-corpus\n"
    (tmp_path / "runs" / "one" / "job.yaml").write_text(job)
    asked = {"run": id_of(tmp_path / "runs" / "one"), "messages": [{"role": "user", "content": "a"}], "rows": [{}]}
    for path in ("/api/chat", "/api/score", "/api/servers"):
        found = chat.post(path, asked)
        assert found.status_code == 403 and f"`{key}` lets code run" in found.text, path


def test_the_newest_weights_are_those_of_the_newest_checkpoint() -> None:
    started = {"event": "started", "time": 1.0}
    saved = {"event": "saved", "step": 5, "time": 2.0, "where": "disk"}
    copied = {"event": "saved", "step": 6, "time": 3.0, "where": "memory"}
    names = [newest_weights(events) for events in ([started], [started, saved], [started, saved, copied])]
    assert names[0] != names[1] == names[2]
    assert newest_weights([{**started, "time": 9.0}]) != names[0]
