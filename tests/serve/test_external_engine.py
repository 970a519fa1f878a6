"""Servers of other programs behind this one: llama.cpp's on a real file, vLLM's by its command line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from serving import Started, started

from stoker.cli.main import main

pytestmark = pytest.mark.slow  # exports a file and starts two servers
ASKED: Any = [{"role": "user", "content": "Who is 3?"}]


@pytest.fixture(scope="module")
def gguf(home: Path) -> str:
    pytest.importorskip("xllamacpp")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        if not (home / "gguf").exists():
            assert main(["export", "full", "--format", "gguf", "--to", "gguf"]) == 0
    (file,) = (home / "gguf").glob("*.gguf")
    return str(file)


@pytest.fixture(scope="module")
def server(home: Path, gguf: str) -> Iterator[Started]:
    with started(home, f"full={gguf}", "--engine", "llama.cpp", "--rows", "2") as found:
        yield found


@pytest.fixture(scope="module")
def client(server: Started) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def test_llamacpp_answers_as_the_model_it_was_exported_from(client: openai.OpenAI, home: Path) -> None:
    from stoker.generate.answer_text import answer_all
    from stoker.generate.open_model import open_model
    from stoker.generate.request import Request, Sampling

    opened = open_model("full", home)
    request = Request(tuple(opened.prompt_ids(ASKED)), 8, Sampling(), opened.codec.stop_ids)
    (expected,) = answer_all(opened.engine(), opened.tokenizer, [request])
    asked: dict[str, Any] = {"model": "full", "messages": ASKED, "max_tokens": 8, "temperature": 0}
    got = client.chat.completions.create(**asked, logprobs=True)
    assert got.choices[0].message.content == expected.text
    assert got.choices[0].logprobs and got.choices[0].logprobs.content
    assert all(token.top_logprobs == [] for token in got.choices[0].logprobs.content)
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == expected.text
    assert chunks[-1].usage and got.usage and chunks[-1].usage.prompt_tokens == got.usage.prompt_tokens
    assert client.completions.create(model="full", prompt="Who is", max_tokens=4, seed=-1).choices[0].text
    assert [model.id for model in client.models.list()] == ["full"]


def test_fields_are_checked_before_llamacpp_passes_over_them(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "full", "messages": ASKED, "max_tokens": 2}
    with pytest.raises(openai.BadRequestError, match="did you mean `top_k`"):
        client.chat.completions.create(**asked, extra_body={"topk": 3})
    with pytest.raises(openai.BadRequestError, match=r"`min_tokens` is not there with llama\.cpp"):
        client.chat.completions.create(**asked, extra_body={"min_tokens": 3})
    with pytest.raises(openai.NotFoundError, match="there are: full"):
        client.chat.completions.create(**asked | {"model": "other"})
    with pytest.raises(openai.BadRequestError):  # llama.cpp's own
        client.chat.completions.create(**asked | {"messages": [{"role": "user", "content": "x " * 4000}]})


def test_command_lines_of_other_servers(
    home: Path, gguf: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(home)
    assert main(["serve", f"full={gguf}", "--engine", "llama.cpp", "--print-command"]) == 0
    line = capsys.readouterr().out
    assert line.startswith(f"llama-server --model {gguf} --alias full ") and "--host 127.0.0.1 --port 8000" in line
    (home / "key").touch(mode=0o600)
    (home / "key").write_text("a-token-of-some-length")
    words = ["adapter", "--base", "tiny", "--engine", "vllm", "--token-file", "key", "--host", "0.0.0.0"]
    assert main(["serve", *words, "--print-command"]) == 0
    line = capsys.readouterr().out
    assert line.startswith('VLLM_API_KEY="$(cat key)" vllm serve tiny --served-model-name tiny --enable-lora')
    assert f"--max-lora-rank 8 --lora-modules adapter={home / 'adapter'} " in line and "some-length" not in line


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["one", "--engine", "llama.cpp"], "stoker export one --format gguf"),
        (["one", "--engine", "vllm"], "stoker export one --format merged"),
        (["tiny", "org/other", "--engine", "vllm"], "one model"),
        (["runs/ful", "--engine", "vllm"], "there is no run runs/ful; did you mean runs/full?"),
        (["one", "--print-command"], "--engine llama.cpp or --engine vllm"),
    ],
)
def test_what_they_cannot_serve_is_refused(
    home: Path, words: list[str], says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(home)
    assert main(["serve", *words]) == 2
    assert says in capsys.readouterr().err
