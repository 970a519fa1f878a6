"""Who may ask, how much, and what happens to what cannot be answered."""

from __future__ import annotations

import asyncio
import json
import random
import time
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
from serving import InProcess, in_process
from starlette.requests import Request

from stoker.data.templates.encode import Encoder
from stoker.serve import request_body
from stoker.serve.api_error import ApiError
from stoker.serve.guard import ClientLeft
from stoker.serve.server_options import ServerOptions

CHAT = "/v1/chat/completions"
ASKED = [{"role": "user", "content": "Who is 3?"}]
LONG = {"model": "one", "messages": ASKED, "max_tokens": 150, "min_tokens": 150}


TOOLS = [{"type": "function", "function": {"name": "f"}}]
CALLED = {"type": "function", "function": {"name": "f", "arguments": "[1]"}}
LOOP = {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}


def nested(depth: int) -> Any:
    return reduce(lambda inner, _: {"type": "object", "properties": {"a": inner}}, range(depth), {"type": "string"})


DEEP = nested(100)
TOO_DEEP = [{"type": "function", "function": {"name": "f", "parameters": nested(300)}}]


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "one", "messages": ASKED, "max_tokens": 4, **fields}


HALF = json.dumps(body(messages=[{"role": "user", "content": "half a pair: \ud83d"}])).encode()


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"temprature": 0}, "temprature", "did you mean `temperature`"),
        ({"messages": [{"role": "user", "contents": "x"}]}, "messages[0].contents", "did you mean `content`"),
        ({"tool_choice": {"type": "function", "allowed": 1}}, "tool_choice.allowed", "field `tool_choice.allowed`"),
        ({"chat_template_kwargs": {"a": [1]}}, "chat_template_kwargs.a", "`chat_template_kwargs.a` must be "),
        ({"model": "three"}, "model", "there are: one, tiny, second, full"),
        ({"temperature": 3}, "temperature", "less than or equal to 2"),
        ({"logit_bias": {"100000": 1}}, "logit_bias", "there is no token 100000"),
        ({"logit_bias": {"²": 1}}, "logit_bias", "the keys of logit_bias are token ids"),
        ({"logit_bias": {"1": 1, "001": 1}}, "logit_bias", "the keys of logit_bias are token ids"),
        ({"stop_token_ids": [10**4000]}, "stop_token_ids", "no token 10000000000000000000...: the vocabulary"),
        ({"top_logprobs": 2}, None, "logprobs is not true"),
        ({"messages": [{"role": "user", "content": "x " * 400}]}, None, "built for 256"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto"}}, "tool_choice", "leave the others out of `tools`"),
        ({"tool_choice": {"type": "custom", "custom": {"name": "a"}}}, "tool_choice", "tools here are functions"),
        ({"tools": [{"type": "custom", "custom": {"name": "a"}}]}, "tools[0]", "tools here are functions"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]", "text only"),
        ({"functions": [{"name": "x"}]}, "functions", "write `tools`"),
        ({"tool_choice": "required"}, None, "there are no tools"),
        ({"tools": TOOLS, "response_format": {"type": "json_object"}}, None, "tools exclude each other"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": DEEP}}}, "response_format", "recursion"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}},
            "response_format",
            "x",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": LOOP}}, "stream": True},
            "response_format",
            "the JSON schema cannot be followed: it allows no text",
        ),
        ({"tools": TOO_DEEP}, None, "refuses this conversation: the messages or tools are nested too deeply"),
        ({"stream_options": {}}, None, "stream is not true"),
        ({"stop": ""}, "stop", "`stop`: an empty text ends no answer"),
        ({"min_tokens": 5}, "min_tokens", "min_tokens is 5, above max_tokens, 4"),
        ({"n": 0}, "n", "greater than or equal to 1"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]", "greater than or equal to 0"),
        ({"max_completion_tokens": 5}, None, "max_tokens and max_completion_tokens differ"),
        ({"tools": TOOLS * 2}, None, "two tools have the same name"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "g"}}},
            None,
            "tool_choice names 'g', which is not among the tools",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [CALLED]}]},
            "messages[0].tool_calls[0].function.arguments",
            "is not a JSON object",
        ),
    ],
)
def test_what_cannot_be_answered_says_why(
    served: InProcess, fields: dict[str, Any], param: str | None, says: str
) -> None:
    reply = served.post(CHAT, body(**fields))
    assert reply.status == (404 if "model" in fields else 400)
    assert says in reply.error["message"] and reply.error["param"] == param and reply.error["type"]


@pytest.mark.parametrize(
    "prompt", ["the " * 400_000, [5] * 400_000, [[5] * 5, [5] * 400_000]], ids=["text", "ids", "several"]
)
def test_a_prompt_far_beyond_the_context_does_not_stop_the_server(
    served: InProcess, monkeypatch: pytest.MonkeyPatch, prompt: Any
) -> None:
    model: Any = served.service.models.find("one").host.engine.decoder.language.model
    looked, embeddings = [0], model.get_input_embeddings

    def counted() -> Any:
        looked[0] += 1
        return embeddings()

    monkeypatch.setattr(model, "get_input_embeddings", counted)
    content = json.dumps({"model": "one", "prompt": prompt}).encode()

    async def beside() -> tuple[Any, float]:
        refused = asyncio.ensure_future(served.ask("POST", "/v1/completions", content))
        longest = 0.0
        while not refused.done():
            begun = time.monotonic()
            assert (await served.ask("GET", "/health", b"")).status == 200
            longest = max(longest, time.monotonic() - begun)
            await asyncio.sleep(0.01)
        return await refused, longest

    reply, longest = asyncio.run(beside())
    assert reply.status == 400 and "built for 256" in reply.error["message"]
    assert reply.error["code"] == "context_length_exceeded" and longest < 1 and looked[0] <= 1


def test_a_text_too_long_to_be_tokenised_is_not(served: InProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Encoder, "encode_one", lambda *_: pytest.fail("it was tokenised"))
    text = "the " * 400_000
    for path, asked in (
        (CHAT, body(messages=[{"role": "user", "content": text}])),
        ("/v1/completions", {"model": "one", "prompt": text}),
        ("/v1/embeddings", {"model": "one", "input": text}),
    ):
        reply = served.post(path, asked)
        assert reply.status == 400 and "characters, and the model was built for 256" in reply.error["message"]


def test_ids_that_the_model_does_not_have_are_refused(served: InProcess) -> None:
    width = served.service.models.find("one").host.vocabulary
    for path, field in (("/v1/completions", "prompt"), ("/v1/embeddings", "input")):
        for ids in ([width], [-1], [1, True], [[1], [width]], [[1], [-1]]):
            assert served.post(path, {"model": "one", field: ids}).status == 400, ids
        assert served.post(path, {"model": "one", field: [width - 1]}).status == 200


@pytest.mark.parametrize(
    ("path", "fields", "says"),
    [
        ("/v1/completions", {"prompt": ""}, "the prompt is empty"),
        ("/v1/completions", {"prompt": [[]], "echo": True, "logprobs": 1}, "the prompt is empty"),
        ("/v1/completions", {"prompt": "a", "max_tokens": 0}, "nothing would be answered"),
        ("/v1/completions", {"prompt": "a", "best_of": 2}, "best_of other than n is not supported"),
        ("/v1/embeddings", {"input": ["a", ""]}, "input[1] is empty"),
        ("/v1/embeddings", {"input": ["a"] * 2049}, "2,049 are more than 2,048"),
        ("/v1/embeddings", {"input": [5] * 257}, "built for 256"),
        ("/v1/embeddings", {"input": "a", "dimensions": 7}, "dimensions, no other number"),
    ],
)
def test_a_prompt_or_a_text_that_cannot_be_used_says_why(
    served: InProcess, path: str, fields: dict[str, Any], says: str
) -> None:
    reply = served.post(path, {"model": "one"} | fields)
    assert reply.status == 400 and says in reply.error["message"]


def test_a_prompt_that_the_engine_refuses_cancels_those_before_it(
    served: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, steps = served.service.models.find("one").host.engine, [0]
    whole = engine.step

    def step() -> None:
        steps[0] += 1
        whole()

    monkeypatch.setattr(engine, "step", step)
    asked = {"model": "one", "prompt": [[5] * 5, [5] * 257], "max_tokens": 200, "min_tokens": 200}
    reply = served.post("/v1/completions", asked)
    assert reply.status == 400 and "built for 256" in reply.error["message"]
    while engine.busy:
        time.sleep(0.01)
    assert steps[0] < 100


def test_fields_without_effect_are_named(served: InProcess) -> None:
    reply = served.post(CHAT, body(user="me", store=False, metadata=None))
    assert reply.status == 200 and reply.headers["x-stoker-ignored"] == "store, user"
    assert "x-stoker-ignored" not in served.post(CHAT, body()).headers


def test_a_template_that_refuses_is_the_clients_error(home: Path, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(home / "tiny", tmp_path / "strict")
    (tmp_path / "strict" / "chat_template.jinja").write_text("{{ raise_exception('users first') }}")
    with in_process(tmp_path, ["strict"]) as strict:
        reply = strict.post(CHAT, body(model="strict"))
    assert reply.status == 400 and "users first" in reply.error["message"]


@pytest.mark.parametrize(
    ("path", "content", "headers", "status"),
    [
        (CHAT, b"{", {}, 400),
        (CHAT, b"[" * 100_000, {}, 400),
        (CHAT, b'{"model": NaN}', {}, 400),
        (CHAT, HALF, {}, 400),
        (CHAT, HALF.replace(rb"\ud83d", b"\xed\xa0\xbd"), {}, 400),
        (CHAT, b"[]", {}, 400),
        (CHAT, b"{}", {"content-type": "text/plain"}, 415),
        (CHAT, b"{}", {"content-encoding": "gzip"}, 415),
        (CHAT, b"{}", {"content-encoding": "br"}, 415),
        (CHAT, b"{}", {"host": "rebound.example"}, 403),
        (CHAT, b"{}", {"host": "[::1].rebound.example"}, 403),
        (CHAT, b"{}", {"host": "10.0.0.1"}, 403),
        ("/v1/chat", b"{}", {}, 404),
        ("/v1/models", b"{}", {}, 405),
    ],
)
def test_other_nonsense_is_refused(
    served: InProcess, path: str, content: bytes, headers: dict[str, str], status: int
) -> None:
    reply = served.post(path, content, headers=headers)
    assert reply.status == status and reply.error["message"]
    if status == 405:
        assert set(reply.headers["allow"].split(", ")) == {"GET", "HEAD"}
        assert reply.error["message"] == f"this path takes {reply.headers['allow']}"


def test_the_names_of_loopback_and_a_charset_of_json_are_accepted(served: InProcess) -> None:
    for host in ("LOCALHOST:8000", "[::1]:1", "127.0.0.9"):
        headers = {"host": host, "content-type": "Application/JSON; charset=utf-8", "content-encoding": "identity"}
        assert served.post("/v1/completions", {"model": "one", "prompt": "a"}, headers=headers).status == 200


def received(parts: list[bytes | str | None], most: int = 100) -> Any:
    """Reads a body that comes in parts: after a text the client leaves, and None never comes."""

    async def receive() -> dict[str, Any]:
        part = parts.pop(0)
        if part is None:
            await asyncio.sleep(60)
        if isinstance(part, str):
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": part, "more_body": bool(parts)}

    request = Request({"type": "http", "headers": []}, receive)
    return asyncio.run(request_body.read_json(request, ServerOptions(body=most)))


def test_a_body_in_parts_has_the_limits_of_a_whole_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert received([b"[1,", b"2", b"]"], most=5) == [1, 2]
    monkeypatch.setattr(request_body, "BODY_SECONDS", 0.05)
    for parts, most, status in (([b"[1,", b"2", b"]", b" "], 4, 413), ([b"[1", None], 100, 408)):
        with pytest.raises(ApiError) as caught:
            received([*parts], most)
        assert caught.value.status == status
    with pytest.raises(ClientLeft):
        received([b"[1]", "left"])


def test_a_token_is_needed_where_one_is_set(home: Path) -> None:
    token = "a-token-of-some-length"
    with in_process(home, ["one"], ServerOptions(token=token)) as guarded:
        elsewhere = {"host": "models.example"}
        assert guarded.get("/health", headers=elsewhere).status == 200
        wrong = ("Bearer wrong", token, "Bearer ", f"Bearer {token[:9]}", f"Bearer {token}x", "Bearer \u00e9", "Bearer")
        for given in ({}, *({"authorization": header} for header in wrong)):
            reply = guarded.post(CHAT, body(), headers=elsewhere | given)
            assert reply.status == 401 and reply.headers["www-authenticate"] == "Bearer"
            for path in ("/metrics", "/v1/models"):
                assert guarded.get(path, headers=elsewhere | given).status == 401
        assert guarded.post(CHAT, body(), headers=elsewhere | {"authorization": f"Bearer {token}"}).status == 200


def test_bodies_queue_and_time_have_limits(home: Path) -> None:
    with in_process(home, ["one"], ServerOptions(body=2000, queue=2, seconds=30)) as small:
        assert small.post(CHAT, body(user="x" * 3000)).status == 413
        assert small.post(CHAT, b"{}", headers={"content-length": "9" * 30}).status == 413
        assert small.post(CHAT, body(n=3)).status == 400
        for prompts, n, status in ((2, 1, 200), (3, 1, 400), (2, 2, 400)):
            asked = {"model": "one", "prompt": ["a"] * prompts, "n": n, "max_tokens": 1}
            assert small.post("/v1/completions", asked).status == status

        async def crowd() -> list[Any]:
            return await asyncio.gather(*(small.ask("POST", CHAT, LONG | {"n": 1}) for _ in range(4)))

        replies = asyncio.run(crowd())
        assert sorted(reply.status for reply in replies) == [200, 200, 429, 429]
        assert all(int(r.headers["retry-after"]) >= 1 for r in replies if r.status == 429)
        assert small.post(CHAT, body()).status == 200 and small.service.queue.now == 0
    with in_process(home, ["one"], ServerOptions(seconds=1e-6)) as hurried:
        assert hurried.post(CHAT, LONG).status == 504
        assert hurried.service.queue.now == 0


def test_a_stream_that_takes_too_long_ends_with_an_error_and_so_does_its_work(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with in_process(home, ["one"]) as served:
        assert served.post(CHAT, body()).status == 200
        engine, steps = served.service.models.find("one").host.engine, [0]
        whole = engine.step

        def step() -> None:
            steps[0] += 1
            time.sleep(0.05)
            whole()

        monkeypatch.setattr(engine, "step", step)
        served.service.options = ServerOptions(seconds=1.0)
        reply = served.post(CHAT, LONG | {"stream": True})
        *parts, last, end = reply.body.decode().split("\n\n")
        assert reply.status == 200 and parts and end == ""
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "timeout"
        while engine.busy:
            time.sleep(0.01)
        assert steps[0] < 100 and served.service.queue.now == 0


def test_a_server_that_ends_or_whose_engine_has_ended_is_not_healthy(home: Path) -> None:
    with in_process(home, ["one"]) as served:
        assert served.get("/health").json == {"status": "ok"}
        served.service.worker.close()
        failed = served.get("/health")
        assert (failed.status, failed.json) == (503, {"status": "failed"})
        served.service.drain()
        assert served.get("/health").json == {"status": "draining"}
        refused = served.post(CHAT, body())
        assert (refused.status, refused.error["code"]) == (503, "draining")


@pytest.mark.parametrize("stream", [False, True])
def test_the_work_of_a_client_that_left_is_cancelled(served: InProcess, stream: bool) -> None:
    engine = served.service.models.find("one").host.engine
    steps: list[int] = []
    whole = engine.step

    async def leave() -> None:
        left = asyncio.Event()
        loop = asyncio.get_running_loop()

        def step() -> None:
            steps.append(engine.running)
            if len(steps) == 5:
                loop.call_soon_threadsafe(left.set)
            whole()

        engine.step = step  # type: ignore[method-assign]
        try:
            await served.ask("POST", CHAT, LONG | {"stream": stream, "max_tokens": 200, "min_tokens": 200}, left=left)
            while engine.busy:
                await asyncio.sleep(0.01)
        finally:
            del engine.step

    asyncio.run(leave())
    assert 5 <= len(steps) < 200 and served.service.queue.now == 0
    assert f'stoker_requests_total{{path="{CHAT}",status="499"}}' in served.get("/metrics").body.decode()
    assert served.post(CHAT, body()).status == 200


@pytest.mark.parametrize(("error", "status"), [(MemoryError("no"), 503), (RuntimeError("broken"), 500)])
@pytest.mark.parametrize("stream", [False, True])
def test_the_server_goes_on_after_a_pass_that_failed(
    served: InProcess, error: Exception, status: int, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from stoker.generate import generation_engine as engines

    def failing(*_: Any) -> Any:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(engines, "next_tokens", failing)
        patch.setattr("stoker.generate.prefill.next_tokens", failing, raising=False)
        reply = served.post(CHAT, body(stream=stream))
    assert reply.status == status and reply.error["type"] == "server_error"
    assert served.post(CHAT, body()).status == 200


def test_metrics_count_what_was_answered(served: InProcess) -> None:
    def value(name: str) -> float:
        lines = served.get("/metrics").body.decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))

    names = ('stoker_answer_tokens_total{key="",model="one"}', 'stoker_first_token_seconds_count{key="",model="one"}')
    before = [value(name) for name in names]
    got = served.post(CHAT, body(n=2, seed=1)).json
    assert value(names[0]) == before[0] + got["usage"]["completion_tokens"]
    assert value(names[1]) == before[1] + 1
    assert value("stoker_answers_running") == value("stoker_answers_waiting") == 0
    unknown = value('stoker_requests_total{path="other",status="404"}')
    assert served.get("/v1/nowhere").status == 404
    assert value('stoker_requests_total{path="other",status="404"}') == unknown + 1
    assert b"nowhere" not in served.get("/metrics").body


def nonsense(draw: random.Random) -> Any:
    """Any JSON value."""
    kinds = [None, True, draw.randint(-5, 10**12), draw.random() * 10, -1, "", "x", "Who?", "\u0000\ud7ff", [], {}]
    value = draw.choice(kinds)
    if draw.random() < 0.2:
        value = [value, draw.choice(kinds)]
    return {"a": value} if draw.random() < 0.1 else value


def fuzzed(draw: random.Random) -> tuple[str, dict[str, Any]]:
    """A sound request in which a few fields are replaced, added or left out."""
    chats = draw.random() < 0.6
    asked: dict[str, Any] = {"model": draw.choice(["one", "second", "tiny", "full"]), "max_tokens": 3}
    if chats:
        asked["messages"] = [{"role": draw.choice(["user", "system", "tool"]), "content": "Who is 3?"}]
    else:
        asked["prompt"] = draw.choice(["Who", [1, 2, 3], [[5], [6, 7]], ["a", "b"], ""])
    sound: dict[str, Any] = {
        "temperature": draw.choice([0, 0.0001, 1e-9, 0.7, 2]),
        "top_p": draw.choice([0, 1e-9, 0.5, 1]),
        "top_k": draw.choice([-1, 0, 1, 10**6]),
        "min_p": draw.choice([0, 1, 0.3]),
        "repetition_penalty": draw.choice([0.1, 1.3, 10]),
        "presence_penalty": draw.choice([-2, 2]),
        "logit_bias": draw.choice([{}, {"5": 100}, {"5": -100, "6": 1.5}, {"-1": 1}, {"4000": 1}]),
        "seed": draw.choice([0, -7, 2**63]),
        "n": draw.choice([1, 3]),
        "stop": draw.choice(["a", ["b", " "], []]),
        "stop_token_ids": draw.choice([[1], [400000]]),
        "logprobs": draw.choice([True, 2, 0]),
        "top_logprobs": draw.choice([0, 20]),
        "stream": draw.random() < 0.5,
        "stream_options": {"include_usage": True},
        "echo": True,
        "ignore_eos": True,
        "min_tokens": draw.choice([0, 2, 10**9]),
        "response_format": draw.choice([{"type": "json_object"}, {"type": "text"}, {"type": "json_schema"}]),
        "tools": draw.choice([[], [{"type": "function", "function": {"name": "f"}}]]),
        "tool_choice": draw.choice(["auto", "none", "required", {"type": "function"}]),
        "max_tokens": draw.choice([1, 5, 0, 10**9]),
        "user": "x",
    }
    for key in draw.sample(sorted(sound), draw.randint(0, 4)):
        asked[key] = sound[key]
    for key in draw.sample([*asked, *sound, "odd"], draw.choice([0, 0, 1, 2])):
        asked[key] = nonsense(draw)
    if draw.random() < 0.1:
        asked.pop(draw.choice(list(asked)))
    if chats and draw.random() < 0.15 and isinstance(asked.get("messages"), list) and asked["messages"]:
        asked["messages"].append(nonsense(draw))
    return CHAT if chats else "/v1/completions", asked


@pytest.mark.slow
def test_500_fuzzed_requests_get_an_answer_or_a_clear_refusal(served: InProcess) -> None:
    draw = random.Random(14)
    statuses: dict[int, int] = {}
    for number in range(500):
        path, asked = fuzzed(draw)
        reply = served.post(path, asked)
        statuses[reply.status] = statuses.get(reply.status, 0) + 1
        case = f"{number}: {json.dumps(asked)[:500]} gave {reply.body[:500]!r}"
        if reply.status == 200:
            if asked.get("stream") is True:
                assert reply.body.endswith(b"data: [DONE]\n\n") and b'"error"' not in reply.body, case
            else:
                assert all(choice["finish_reason"] for choice in reply.json["choices"]), case
        else:
            assert 400 <= reply.status < 500 and len(reply.error["message"]) > 5, case
    assert statuses[200] > 100 and statuses[400] > 100, statuses
    assert served.service.queue.now == 0
