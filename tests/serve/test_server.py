"""A started ``stoker serve``, asked by OpenAI's own client and by lm-evaluation-harness."""

from __future__ import annotations

import signal
import ssl
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from serving import Started, started

from stoker.cli.main import main
from stoker.generate.answer_text import answer_all
from stoker.generate.open_model import open_model
from stoker.generate.request import Request, Sampling

ASKED: Any = [{"role": "user", "content": "Who is 3?"}]
TOKEN = "a-token-of-some-length"


@pytest.fixture(scope="module")
def server(home: Path) -> Iterator[Started]:
    (home / "token").touch(mode=0o600)
    (home / "token").write_text(TOKEN + "\n")
    with started(home, "one", "second=two", "--token-file", "token") as found:
        yield found


@pytest.fixture(scope="module")
def client(server: Started) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=TOKEN, max_retries=0)


def test_the_official_client_gets_the_engines_answer(client: openai.OpenAI, home: Path) -> None:
    opened = open_model("two", home)
    request = Request(tuple(opened.prompt_ids(ASKED)), 10, Sampling(), opened.codec.stop_ids)
    (expected,) = answer_all(opened.engine(), opened.tokenizer, [request])
    got = client.chat.completions.create(model="second", messages=ASKED, max_tokens=10, temperature=0, logprobs=True)
    assert got.choices[0].message.content == expected.text
    assert got.choices[0].logprobs is not None and got.choices[0].logprobs.content
    with client.chat.completions.create(
        model="second",
        messages=ASKED,
        max_tokens=10,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    ) as parts:
        chunks = list(parts)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == expected.text
    last = chunks[-1].usage  # what came from an earlier request may differ
    assert last and got.usage and last.completion_tokens == got.usage.completion_tokens
    assert last.prompt_tokens == got.usage.prompt_tokens


def test_the_official_client_finds_models_completions_and_embeddings(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["one", "tiny", "second"]
    completion = client.completions.create(model="one", prompt="Who is", max_tokens=4, echo=True, logprobs=2, n=2)
    assert all(choice.text.startswith("Who is") for choice in completion.choices)
    given = client.embeddings.create(model="one", input=["a", "b"])  # it asks for base64
    plain = client.embeddings.create(model="one", input=["a", "b"], encoding_format="float")
    for one, other in zip(given.data, plain.data, strict=True):
        assert one.embedding == pytest.approx(other.embedding, abs=1e-6)


def test_the_official_client_raises_its_own_errors(server: Started, client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="there are: one, tiny, second"):
        client.chat.completions.create(model="three", messages=ASKED)
    with pytest.raises(openai.BadRequestError, match="did you mean `top_k`"):
        client.chat.completions.create(model="one", messages=ASKED, extra_body={"topk": 3})
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0).models.list()


def test_a_closed_connection_cancels_its_work(server: Started, client: openai.OpenAI) -> None:
    def value(name: str) -> float:
        page = httpx2.get(f"{server.url}/metrics", headers={"authorization": f"Bearer {TOKEN}"}).text
        return sum(float(line.split()[-1]) for line in page.splitlines() if line.startswith(name))

    cancelled = value("stoker_requests_cancelled_total")
    for stream in (True, False):
        body = {"model": "one", "messages": ASKED, "max_tokens": 200, "min_tokens": 200, "n": 32, "stream": stream}
        headers = {"authorization": f"Bearer {TOKEN}"}
        address = f"{server.url}/v1/chat/completions"
        if stream:
            with httpx2.stream("POST", address, json=body, headers=headers) as reply:
                next(reply.iter_lines())
        else:
            with pytest.raises(httpx2.ReadTimeout):
                httpx2.post(address, json=body, headers=headers, timeout=httpx2.Timeout(10, read=0.2))
    while value("stoker_answers_running") + value("stoker_answers_waiting") or value("stoker_requests_in_flight") > 1:
        pass  # the test's own time limit ends this
    assert value("stoker_requests_cancelled_total") == cancelled + 2
    assert client.chat.completions.create(model="one", messages=ASKED, max_tokens=2).usage


def test_adapters_come_and_go(server: Started, client: openai.OpenAI, home: Path) -> None:
    def text(model: str) -> str | None:
        return client.chat.completions.create(
            model=model, messages=ASKED, max_tokens=10, temperature=0
        ).choices[0].message.content  # fmt: skip

    def ask(path: str, **body: Any) -> Any:
        return client.post(f"/{path}", cast_to=object, body=body)

    before = {name: text(name) for name in ("one", "second", "tiny")}
    ask("load_lora_adapter", lora_name="late", lora_path=str(home / "adapter"))
    assert {name: text(name) for name in before} == before
    assert text("late") == before["second"]  # the adapter is an export of that run
    with pytest.raises(openai.BadRequestError, match="served already"):
        ask("load_lora_adapter", lora_name="late", lora_path=str(home / "adapter"))
    with pytest.raises(openai.BadRequestError, match="not an adapter, and cannot be unloaded"):
        ask("unload_lora_adapter", lora_name="tiny")
    ask("unload_lora_adapter", lora_name="late")
    with pytest.raises(openai.NotFoundError):
        text("late")
    assert {name: text(name) for name in before} == before
    with pytest.raises(openai.BadRequestError, match="no adapter"):
        ask("load_lora_adapter", lora_name="late", lora_path=str(home / "tiny"))


@pytest.mark.slow
def test_sigterm_lets_answers_end(home: Path) -> None:
    with started(home, "one") as found:
        client = openai.OpenAI(base_url=f"{found.url}/v1", api_key="none", max_retries=0)
        parts = client.chat.completions.create(
            model="one", messages=ASKED, max_tokens=200, stream=True, extra_body={"min_tokens": 200}
        )
        chunks = [next(parts)]
        found.process.send_signal(signal.SIGTERM)
        chunks += list(parts)
        assert chunks[-1].choices[0].finish_reason == "length"
        assert found.process.wait(60) == 0
        with pytest.raises(openai.APIConnectionError):
            client.models.list()


@pytest.mark.slow
def test_tls_by_files(home: Path, tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    words = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    alternative = ["-addext", "subjectAltName=IP:127.0.0.1"]
    made = ["openssl", *words.split(), *alternative, "-keyout", str(key), "-out", str(certificate)]
    if subprocess.run(made, capture_output=True, check=False).returncode != 0:
        pytest.skip("there is no openssl to make a certificate with")
    with started(home, "one", "--tls-key", str(key), "--tls-certificate", str(certificate)) as found:
        assert found.url.startswith("https://")
        trust = ssl.create_default_context(cafile=str(certificate))
        assert httpx2.get(f"{found.url}/health", verify=trust).json() == {"status": "ok"}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["one", "--host", "0.0.0.0"], "a token is needed"),
        (["one", "--token", "short"], "at least 16"),
        (["one", "--tls-key", "one.yaml"], "go together"),
        (["none"], "there is no run none"),
        (["runs/ful"], "there is no run runs/ful; did you mean runs/full?"),
        (["one", "tiny=two", "--port", "0"], "two models would be served as 'tiny'"),
        (["one", "--queue", "0"], "at least 1"),
        (["one", "--port", "70000"], "from 0 to 65535"),
    ],
)
def test_wrong_options_are_one_clear_error(
    home: Path, words: list[str], says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(home)
    assert main(["serve", *words]) == 2
    assert says in capsys.readouterr().err


def test_help_does_not_wait_for_torch() -> None:
    import sys

    shown = "try: main(['serve', '--help'])\nfinally: print('modules', *sys.modules)"
    program = f"import sys; from stoker.cli.main import main\n{shown}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    text, modules = done.stdout.split("\nmodules ")
    assert "--token-file" in text and "torch" not in modules.split()


@pytest.mark.slow
def test_lm_eval_scores_as_the_model_does(server: Started, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Log-likelihoods of continuations by ``local-completions``, against a forward pass."""
    import torch

    models = pytest.importorskip("lm_eval.models.openai_completions")
    instances = pytest.importorskip("lm_eval.api.instance")
    monkeypatch.setenv("OPENAI_API_KEY", TOKEN)
    model = models.LocalCompletionsAPI(
        base_url=f"{server.url}/v1/completions",
        model="second",
        tokenizer=str(home / "tiny"),
        tokenizer_backend="huggingface",
        num_concurrent=1,
        batch_size=4,
    )
    pairs = [("Who is", " the wind?"), ("The sea", " is blue"), ("A poem about", " Paris."), ("x", "y")]
    asked = [
        instances.Instance(request_type="loglikelihood", doc={}, arguments=pair, idx=n) for n, pair in enumerate(pairs)
    ]
    got = model.loglikelihood(asked)
    opened = open_model("two", home)
    for (context, continuation), (score, greedy) in zip(pairs, got, strict=True):
        ids = model.tok_encode(context + continuation)
        first = len(model.tok_encode(context))
        with torch.no_grad():
            log_p = opened.decoder.model(input_ids=torch.tensor([ids])).logits[0].float().log_softmax(-1)
        targets = torch.tensor(ids[first:])
        expected = log_p[first - 1 : -1].gather(1, targets[:, None]).sum()
        assert score == pytest.approx(float(expected), abs=1e-4)
        assert greedy == bool((log_p[first - 1 : -1].argmax(-1) == targets).all())
    until = instances.Instance(
        request_type="generate_until", doc={}, arguments=("Who is 3?", {"until": ["."], "max_gen_toks": 8}), idx=0
    )
    assert len(model.generate_until([until])) == 1


def test_requests_of_many_threads_are_all_answered(client: openai.OpenAI) -> None:
    alone = {
        seed: client.chat.completions.create(model="one", messages=ASKED, max_tokens=8, seed=seed) for seed in range(6)
    }
    together: dict[int, Any] = {}

    def ask(seed: int) -> None:
        together[seed] = client.chat.completions.create(model="one", messages=ASKED, max_tokens=8, seed=seed)

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in alone]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {seed: got.choices[0].message.content for seed, got in together.items()} == {
        seed: got.choices[0].message.content for seed, got in alone.items()
    }
