"""Answers through the server are the engine's own, whatever the form they are asked for in."""

from __future__ import annotations

import asyncio
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from serving import InProcess, in_process
from tokenizers import processors

from stoker.data.templates.chat_template import CHATML, ChatTemplate
from stoker.generate.answer_text import answer_all
from stoker.generate.open_model import open_model
from stoker.generate.request import BASE, Request, Sampling
from stoker.serve.endpoint_state import ANSWER_STEP, engine_requests
from stoker.serve.openai import chat_completions
from stoker.serve.openai.bodies import CompletionBody
from stoker.serve.openai.grammar import SchemaConstraint
from stoker.serve.openai.tool_calls import ToolCall
from tiny_llama import save_tiny_llama
from tiny_tokenizer import byte_fallback_tokenizer

ASKED = [{"role": "user", "content": "Who is 3?"}]


def chat(served: InProcess, model: str = "one", **fields: Any) -> Any:
    reply = served.post("/v1/chat/completions", {"model": model, "messages": ASKED, "max_tokens": 12, **fields})
    assert reply.status == 200, reply.body
    return reply.json


def text_of(answer: Any, choice: int = 0) -> str:
    return str(answer["choices"][choice]["message"]["content"])


def events(body: bytes) -> list[Any]:
    parts = body.decode().split("\n\n")
    assert parts[-1] == "" and parts[-2] == "data: [DONE]"
    return [json.loads(part.removeprefix("data: ")) for part in parts[:-2]]


@pytest.mark.parametrize(
    ("model", "run", "adapter"), [("one", "one", None), ("second", "two", None), ("tiny", "one", BASE)]
)
def test_greedy_answers_are_those_of_the_engine(
    served: InProcess, home: Path, model: str, run: str, adapter: str | None
) -> None:
    opened = open_model(run, home)
    request = Request(
        tuple(opened.prompt_ids(ASKED)), 12, Sampling(), opened.codec.stop_ids, adapter=adapter, alternatives=2
    )
    (expected,) = answer_all(opened.engine(), opened.tokenizer, [request])
    got = chat(served, model, temperature=0, logprobs=True, top_logprobs=2)
    assert text_of(got) == expected.text
    assert got["choices"][0]["finish_reason"] == expected.finish
    assert got["usage"]["completion_tokens"] == len(expected.generation.tokens)
    assert got["usage"]["prompt_tokens"] == len(request.prompt)
    scores = got["choices"][0]["logprobs"]["content"]
    tokens = [t for t in expected.generation.tokens if t.id not in request.stop_ids]
    assert [s["logprob"] for s in scores] == pytest.approx([t.log_probability for t in tokens], abs=1e-5)
    assert bytes(byte for s in scores for byte in s["bytes"]).decode(errors="replace") == expected.text
    for score, token in zip(scores, tokens, strict=True):
        best = [other["logprob"] for other in score["top_logprobs"]]
        assert best == pytest.approx([value for _, value in token.alternatives], abs=1e-5)


def test_every_sampling_field_reaches_the_engine(served: InProcess) -> None:
    model = served.service.models.find("one")

    def requests(**fields: Any) -> list[Request]:
        return engine_requests(
            CompletionBody(model="one", prompt="a", **fields), model, [1], max_tokens=9, alternatives=0
        )

    fields = {"temperature": 0.5, "top_k": 3, "top_p": 0.25, "min_p": 0.125, "repetition_penalty": 1.5}
    fields |= {"presence_penalty": 0.75, "frequency_penalty": -0.5}
    first, second = requests(**fields, logit_bias={"7": 2.0}, seed=-1, n=2, stop_token_ids=[9], min_tokens=2)
    assert first.sampling == Sampling(**fields, bias=((7, 2.0),), seed=2**64 - 1)
    assert second.sampling == replace(first.sampling, seed=ANSWER_STEP - 1)
    assert first.stop_ids == {9, *model.opened.codec.stop_ids} and (first.max_tokens, first.min_tokens) == (9, 2)
    (plain,) = requests(top_k=-1, temperature=1e-9, ignore_eos=True)
    assert (plain.sampling.top_k, plain.sampling.temperature, plain.stop_ids) == (0, 0, frozenset())
    assert requests(top_k=10**6)[0].sampling.top_k == model.host.vocabulary
    assert len({requests()[0].sampling.seed for _ in range(3)}) == 3


def test_models_are_different_and_listed_with_their_base(served: InProcess) -> None:
    texts = {name: text_of(chat(served, name, temperature=0)) for name in ("one", "second", "tiny", "full")}
    assert len(set(texts.values())) == 4
    listed = {model["id"]: model["parent"] for model in served.get("/v1/models").json["data"]}
    assert listed == {"one": "tiny", "tiny": None, "second": "tiny", "full": None}
    assert served.get("/v1/models/second").json["parent"] == "tiny"
    models = {model.name: model for model in served.service.models}
    assert models["one"].host is models["second"].host is models["tiny"].host is not models["full"].host


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_stream_is_the_whole_answer_in_pieces(served: InProcess, path: str) -> None:
    chats = "chat" in path
    body = {"model": "one", "max_tokens": 16, "seed": 5, "n": 2, "stop": [" is"], "logprobs": True if chats else 1}
    body |= {"messages": ASKED} if chats else {"prompt": "Who is", "echo": True}
    whole = served.post(path, body).json
    found = events(served.post(path, body | {"stream": True, "stream_options": {"include_usage": True}}).body)
    assert found[-1]["choices"] == [] and found[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    assert all(part["usage"] is None for part in found[:-1])
    for number, choice in enumerate(whole["choices"]):
        parts = [part["choices"][0] for part in found[:-1] if part["choices"][0]["index"] == number]
        assert [part["finish_reason"] for part in parts if part["finish_reason"]] == [choice["finish_reason"]]
        if chats:
            assert parts[0]["delta"]["role"] == "assistant"
            text = "".join(part["delta"].get("content", "") for part in parts)
            scores = [s for part in parts if part["logprobs"] for s in part["logprobs"]["content"]]
            assert (text, scores) == (choice["message"]["content"], choice["logprobs"]["content"])
        else:
            assert "".join(part["text"] for part in parts) == choice["text"]
            for key in ("tokens", "token_logprobs", "text_offset"):
                assert [value for part in parts for value in part["logprobs"][key]] == choice["logprobs"][key]


def test_a_seed_gives_the_same_answer_in_any_company(served: InProcess) -> None:
    alone = chat(served, seed=11)
    several = chat(served, seed=11, n=3)
    assert text_of(several) == text_of(alone)
    assert len({text_of(several, number) for number in range(3)}) == 3

    async def crowd() -> list[Any]:
        body = {"model": "one", "messages": ASKED, "max_tokens": 12}
        asked = [served.ask("POST", "/v1/chat/completions", body | {"seed": seed}) for seed in range(8, 16)]
        return [reply.json for reply in await asyncio.gather(*asked)]

    assert text_of(asyncio.run(crowd())[3]) == text_of(alone)


def test_echo_gives_the_log_probabilities_of_the_prompt(served: InProcess, home: Path) -> None:
    import torch

    opened = open_model("full", home)
    ids = opened.text_ids("The wind is cold.")
    model = opened.decoder.model.float()
    with torch.no_grad():
        scores = model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
    expected = [float(scores[place, token]) for place, token in enumerate(ids[1:])]
    asked = {"model": "full", "max_tokens": 0, "echo": True, "logprobs": 1, "temperature": 0}
    got = served.post("/v1/completions", asked | {"prompt": [ids, ids[:4]]}).json
    assert [len(choice["logprobs"]["tokens"]) for choice in got["choices"]] == [len(ids), 4]
    first = got["choices"][0]["logprobs"]
    assert first["token_logprobs"][0] is None and first["top_logprobs"][0] is None
    assert first["token_logprobs"][1:] == pytest.approx(expected, abs=1e-5)
    assert "".join(first["tokens"]) == "The wind is cold." == got["choices"][0]["text"]
    assert [max(best.values()) for best in first["top_logprobs"][1:]] == pytest.approx(
        scores[:-1].amax(-1).tolist(), abs=1e-5
    )
    for token, score, best in list(zip(first["tokens"], first["token_logprobs"], first["top_logprobs"], strict=True))[
        1:
    ]:
        assert best[token] == score and len(best) <= 2
    assert got["usage"]["completion_tokens"] == 0
    text = served.post("/v1/completions", asked | {"prompt": "The wind is cold."}).json["choices"][0]["logprobs"]
    assert text["tokens"] == first["tokens"]
    assert text["token_logprobs"][1:] == pytest.approx(expected, abs=1e-5)


def test_text_offsets_are_places_in_the_returned_text(tmp_path: Path) -> None:
    tokenizer = byte_fallback_tokenizer()
    start, a, b = (tokenizer.token_to_id(token) for token in ("<s>", "▁a", "▁b"))
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", start)])
    save_tiny_llama(tmp_path / "llama", tokenizer, end="</s>")
    body = {"model": "llama", "prompt": "a b é", "max_tokens": 2, "echo": True, "logprobs": 0}
    with in_process(tmp_path, ["llama"]) as served:
        found = []
        for prompt in ("a b é", [start, a, b], [a, b]):
            asked = body | {"prompt": prompt, "logit_bias": {str(a): 100}}
            (choice,) = served.post("/v1/completions", asked).json["choices"]
            found.append((choice["text"], choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]))
    # Neither the start token of a text nor the space that is put before it is in the text.
    assert found == [
        (
            "a b éa a",
            ["<s>", " a", " b", " ", "bytes:\\xc3", "bytes:\\xa9", " a", " a"],
            [0, 0, 1, 3, 4, 4, 5, 6],
        ),
        ("<s> a ba a", ["<s>", " a", " b", " a", " a"], [0, 3, 5, 7, 8]),
        ("a ba a", [" a", " b", " a", " a"], [0, 1, 3, 4]),
    ]


def test_a_stop_string_ends_the_text_before_it(served: InProcess) -> None:
    asked = {"model": "full", "temperature": 0, "max_tokens": 30, "min_tokens": 30, "logprobs": True}
    whole = text_of(chat(served, **asked))
    stop = whole[4:6]
    got = chat(served, **asked, stop=stop)
    assert text_of(got) == whole[: whole.index(stop)] and got["choices"][0]["finish_reason"] == "stop"
    said = "".join(score["token"] for score in got["choices"][0]["logprobs"]["content"])
    assert said.startswith(text_of(got)) and len(said) < len(whole)
    last = got["choices"][0]["logprobs"]["content"][-1]["token"]
    assert len(said.removesuffix(last)) < len(text_of(got))  # no token that begins at the stop


def test_a_model_does_not_wait_for_a_long_answer_of_another(served: InProcess) -> None:
    async def ask(model: str, tokens: int) -> None:
        body = {"model": model, "prompt": "Who", "max_tokens": tokens, "min_tokens": tokens}
        assert (await served.ask("POST", "/v1/completions", body)).status == 200

    async def both() -> None:
        long = asyncio.ensure_future(ask("full", 250))
        while not served.service.models.find("full").host.engine.running:
            await asyncio.sleep(0.001)
        await ask("one", 2)
        assert not long.done()
        await long

    asyncio.run(both())


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "kind": {"enum": ["wind", "sea"]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("seed", range(4))
def test_an_answer_follows_its_schema(served: InProcess, seed: int) -> None:
    named = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
    got = chat(served, response_format=named, seed=seed, max_tokens=120, n=2)
    for choice in (0, 1):
        jsonschema.validate(json.loads(text_of(got, choice)), SCHEMA)
        assert got["choices"][choice]["finish_reason"] == "stop"


def test_a_schema_that_allows_no_next_token_is_an_error(served: InProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(constraint: SchemaConstraint, logits_V: torch.Tensor) -> None:
        constraint.failed = "it is too large"

    monkeypatch.setattr(SchemaConstraint, "mask", fail)
    body = {"model": "one", "messages": ASKED, "response_format": {"type": "json_object"}, "max_tokens": 9}
    reply = served.post("/v1/chat/completions", body)
    assert (reply.status, reply.error["message"]) == (400, "the JSON schema cannot be followed: it is too large")


def test_a_stop_token_beyond_the_models_vocabulary_is_none(served: InProcess) -> None:
    model = served.service.models.find("one")
    width = model.host.vocabulary
    constraint = model.grammars.of_schema({"enum": [1]}, param="tools", stop_ids={2, width})
    logits = torch.zeros(width)
    constraint.mask(logits)
    assert logits.isneginf().any() and not logits.isneginf().all()
    for token in model.opened.tokenizer.encode("1", add_special_tokens=False).ids:
        constraint.accept(token)
    constraint.mask(logits := torch.zeros(width))
    assert logits[2] == 0
    codec = replace(model.opened.codec, stop_ids=frozenset({2, width}))
    beyond = replace(model, opened=replace(model.opened, codec=codec))
    body = CompletionBody(model="one", prompt="a")
    assert engine_requests(body, beyond, [1], max_tokens=9, alternatives=0)[0].stop_ids == {2}


def test_json_objects_are_what_an_answer_begins_with(served: InProcess) -> None:
    got = chat(served, response_format={"type": "json_object"}, max_tokens=40, seed=1)
    assert text_of(got).startswith("{")
    if got["choices"][0]["finish_reason"] == "stop":
        assert isinstance(json.loads(text_of(got)), dict)


def tool(name: str) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["city", "days"],
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "sea"}}])
@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_that_has_to_be_called_is(served: InProcess, choice: Any, stream: bool) -> None:
    body = {"model": "one", "messages": ASKED, "max_tokens": 80, "seed": 3, "stream": stream}
    body |= {"tools": [tool("wind"), tool("sea")], "tool_choice": choice}
    reply = served.post("/v1/chat/completions", body)
    if stream:
        parts = [part["choices"][0] for part in events(reply.body)]
        (call,) = [call for part in parts for call in part["delta"].get("tool_calls", [])]
        finish = parts[-1]["finish_reason"]
    else:
        (call,) = reply.json["choices"][0]["message"]["tool_calls"]
        finish = reply.json["choices"][0]["finish_reason"]
    assert finish == "tool_calls" and call["type"] == "function" and call["id"]
    assert call["function"]["name"] in (["sea"] if isinstance(choice, dict) else ["wind", "sea"])
    jsonschema.validate(json.loads(call["function"]["arguments"]), tool("x")["function"]["parameters"])


class TwoCalls:
    """Finds two calls in the second piece of an answer."""

    def __init__(self, *_: Any) -> None:
        self.pushed = 0

    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        self.pushed += 1
        return "", [ToolCall("wind", "{}"), ToolCall("sea", "{}")] if self.pushed == 2 else []

    def finish(self) -> tuple[str, list[ToolCall]]:
        return "", []


@pytest.mark.parametrize(("several", "called"), [(True, ["wind", "sea"]), (False, ["wind"])])
def test_an_answer_ends_with_its_first_call_where_it_may_have_no_more(
    served: InProcess, several: bool, called: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_completions, "CallFinder", TwoCalls)
    fields = {"tools": [tool("wind"), tool("sea")], "parallel_tool_calls": several, "min_tokens": 40, "max_tokens": 40}
    (choice,) = chat(served, **fields)["choices"]
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == called
    assert choice["finish_reason"] == ("length" if several else "tool_calls")


def test_a_tool_without_parameters_is_called_without_arguments(served: InProcess) -> None:
    tools = [{"type": "function", "function": {"name": "wind"}}]
    for seed in range(3):
        got = chat(served, tools=tools, tool_choice="required", max_tokens=40, seed=seed)
        (call,) = got["choices"][0]["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == {}


@pytest.mark.parametrize("names", [["wind"], ["sea", "wind"]])
def test_references_in_the_schema_of_a_forced_tool_lead_to_its_definitions(served: InProcess, names: list[str]) -> None:
    days = {"type": "integer", "minimum": 1, "maximum": 9}
    parameters = {
        "type": "object",
        "properties": {
            "days": {"$ref": "#/$defs/days"},
            "others": {"type": "array", "items": {"$ref": "#/$defs/days"}},
        },
        "required": ["days"],
        "additionalProperties": False,
        "$defs": {"days": days},
    }
    tools = [{"type": "function", "function": {"name": name, "parameters": parameters}} for name in names]
    for schema in (parameters, parameters | {"$id": "https://example.org/days"}):
        tools[-1]["function"]["parameters"] = schema  # type: ignore[index]
        got = chat(served, tools=tools, tool_choice="required", max_tokens=120, seed=2)
        (call,) = got["choices"][0]["message"]["tool_calls"]
        jsonschema.validate(json.loads(call["function"]["arguments"]), schema)


def test_tools_are_part_of_the_prompt_unless_none_may_be_called(served: InProcess) -> None:
    plain = chat(served)["usage"]["prompt_tokens"]
    assert chat(served, tools=[tool("wind")])["usage"]["prompt_tokens"] > plain
    assert chat(served, tools=[tool("wind")], tool_choice="none")["usage"]["prompt_tokens"] == plain


@pytest.mark.parametrize("stream", [False, True])
def test_fields_that_the_template_does_not_write_are_named(served: InProcess, home: Path, stream: bool) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "wind", "arguments": "{}"}}
    result = {"role": "tool", "content": "Cold.", "tool_call_id": "1"}
    messages = [{**ASKED[0], "name": "Ann"}, {"role": "assistant", "content": "", "tool_calls": [call]}, result]
    body = {"messages": messages, "tools": [tool("wind")], "max_tokens": 2, "stream": stream, "user": "me"}
    turns = "messages[].name, messages[].tool_call_id, messages[].tool_calls"
    reply = served.post("/v1/chat/completions", body | {"model": "one"})
    assert reply.headers["x-stoker-ignored"] == f"{turns}, user"
    one = served.service.models.find("one")
    plain = replace(one.opened.codec, template=ChatTemplate(CHATML))
    served.service.models.add(replace(one, name="plain", opened=replace(one.opened, codec=plain)))
    try:
        for choice in ("auto", "required"):
            reply = served.post("/v1/chat/completions", body | {"model": "plain", "tool_choice": choice})
            assert reply.status == 200 and reply.headers["x-stoker-ignored"] == f"{turns}, tools, user"
        reply = served.post("/v1/chat/completions", {"model": "plain", "messages": ASKED, "max_tokens": 2})
        assert "x-stoker-ignored" not in reply.headers
    finally:
        served.service.models.remove("plain")


def test_variables_of_the_template_are_set_by_a_request(home: Path, tmp_path: Path) -> None:
    source = CHATML + "{% if style is defined %}{{ style }}{% endif %}{% if long %}{{ messages }}{% endif %}"
    shutil.copytree(home / "tiny", tmp_path / "tiny")
    (tmp_path / "tiny" / "chat_template.jinja").write_text(source)
    with in_process(tmp_path, ["tiny"]) as served:

        def asked(**variables: Any) -> Any:
            body = {"model": "tiny", "messages": ASKED, "max_tokens": 1, "chat_template_kwargs": variables}
            return served.post("/v1/chat/completions", body)

        plain, short, odd = asked(), asked(style='The sea " %}.', long=False), asked(add_generation_prompt=False)
        counts = [reply.json["usage"]["prompt_tokens"] for reply in (plain, short, asked(long=True), odd)]
        assert counts[0] < counts[1] < counts[2] and counts[3] == counts[0]
        assert "x-stoker-ignored" not in short.headers and odd.headers["x-stoker-ignored"] == "chat_template_kwargs"
        assert asked(style=["x"]).status == 400
        code = asked(**{"a is defined %}{% endif %}{{ 'The sea' * 9 }}{% if a": True})  # a name is no code
        assert code.json["usage"]["prompt_tokens"] == counts[0]
        assert code.headers["x-stoker-ignored"] == "chat_template_kwargs"


def test_answers_may_come_back_as_clients_keep_them(served: InProcess) -> None:
    kept = {"role": "assistant", "content": "It.", "audio": None, "function_call": None, "tool_calls": None}
    assert chat(served, messages=[*ASKED, kept, *ASKED])["usage"]["completion_tokens"]


def test_embeddings_are_the_mean_of_the_hidden_states(served: InProcess, home: Path) -> None:
    import torch

    texts = ["The sea is blue.", "What is it?", "x"]
    got = served.post("/v1/embeddings", {"model": "full", "input": texts})
    opened = open_model("full", home)
    for text, found in zip(texts, got.json["data"], strict=True):
        with torch.no_grad():
            out = opened.decoder.model.model(input_ids=torch.tensor([opened.text_ids(text)]))
        expected = torch.nn.functional.normalize(out.last_hidden_state[0].float().mean(0), dim=0)
        torch.testing.assert_close(torch.tensor(found["embedding"]), expected, atol=1e-5, rtol=1e-4)
        assert math.isclose(sum(x * x for x in found["embedding"]), 1, rel_tol=1e-5)
    one, base = (
        served.post("/v1/embeddings", {"model": name, "input": texts}).json["data"][0] for name in ("one", "tiny")
    )
    assert one["embedding"] != base["embedding"]
