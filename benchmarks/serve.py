"""`stoker serve` against other servers: SmolLM2-135M, the same prompts, streamed chats over HTTP.

make .venv/.installed-bench
python benchmarks/serve.py                                # all sides, three rounds; the median of each
python benchmarks/serve.py --sides stoker transformers --rounds 1
python benchmarks/serve.py --minutes 10                   # clients that come, stream, disconnect and send nonsense

transformers' server runs as it did best here, by hand: continuous batching, 64 blocks of 32 tokens, 128 tokens a
batch. Every server is started for each round, so that an idle one takes no time from another.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
from tokenizers import Tokenizer

MODEL = "smollm2-135m"
STREAMS, TOKENS = 16, 64
ALONE = 5  # answers of one stream in a round
QUESTIONS = (
    "Write a long story about a lighthouse keeper and the sea.",
    "Explain in detail how bread is made, step by step.",
    "Describe a walk through a large city in the rain.",
    "List and explain twenty uses of a wooden box.",
)
READY = 300.0  # seconds
CLIENTS = 32
NONSENSE: tuple[Any, ...] = ({}, {"model": 5}, {"messages": "x"}, [], {"model": "none", "messages": []}, "text")


@dataclass
class Side:
    """A server.

    Attributes:
        command: with ``{port}``.
        model: what requests name.
    """

    command: list[str]
    model: str


@dataclass
class Result:
    """Figures of the rounds of a side."""

    many: list[float] = field(default_factory=list)  # tokens/s
    one: list[float] = field(default_factory=list)  # tokens/s
    first: list[float] = field(default_factory=list)  # seconds to the first token of a short prompt


def sides(folder: Path, gguf: Path) -> dict[str, Side]:
    """The servers by name; all weights are float32 but those of the 4-bit file."""
    stoker = [sys.executable, "-m", "stoker", "serve"]
    batching = [
        "--continuous-batching",
        "--cb-block-size",
        "32",
        "--cb-num-blocks",
        "64",
        "--cb-max-batch-tokens",
        "128",
    ]
    own = [sys.executable, __file__, "--llama-cpp-server", str(gguf), "{port}"]
    return {
        "stoker": Side([*stoker, f"smol={folder}", "--port", "{port}"], "smol"),
        "transformers": Side(
            ["transformers", "serve", *batching, "--dtype", "float32", "--port", "{port}"], str(folder)
        ),
        "stoker llama.cpp": Side([*stoker, f"smol={gguf}", "--engine", "llama.cpp", "--port", "{port}"], "smol"),
        "llama.cpp": Side(own, "default"),
    }


@contextmanager
def running(side: Side) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A started server's address and process; it has answered once."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [part.format(port=port) for part in side.command]
    with tempfile.TemporaryFile() as log:
        server = subprocess.Popen(command, stdout=log, stderr=log)
        address, end = f"http://127.0.0.1:{port}", time.monotonic() + READY
        try:
            while True:
                try:
                    asyncio.run(together(address, side.model, 1, None, tokens=4))
                    break
                except httpx.HTTPStatusError as error:
                    if error.response.status_code < 500:
                        raise
                    time.sleep(0.5)
                except httpx.HTTPError:
                    if server.poll() is not None or time.monotonic() > end:
                        log.seek(0)
                        sys.exit(f"{' '.join(command)} does not answer:\n{log.read()[-3000:].decode()}")
                    time.sleep(0.5)
            yield address, server
        finally:
            server.send_signal(signal.SIGTERM)
            try:
                server.wait(30)
            except subprocess.TimeoutExpired:
                server.kill()


def request(model: str, question: str, tokens: int) -> dict[str, Any]:
    """A greedy chat."""
    turns = [{"role": "user", "content": question}]
    return {"model": model, "messages": turns, "max_tokens": tokens, "temperature": 0}


async def chat(client: httpx.AsyncClient, model: str, question: str, tokens: int) -> tuple[str, float]:
    """Streams an answer; (text, seconds to the first of it)."""
    begin, first, text = time.perf_counter(), 0.0, ""
    asked = {**request(model, question, tokens), "stream": True}
    async with client.stream("POST", "/v1/chat/completions", json=asked) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            choices = json.loads(line[6:]).get("choices") or [{}]
            if piece := choices[0].get("delta", {}).get("content"):
                first = first or time.perf_counter() - begin
                text += piece
    return text, first


async def together(
    address: str, model: str, streams: int, tokenizer: Tokenizer | None, *, tokens: int = TOKENS
) -> float:
    """Tokens a second of several streams, by the text that came; without a tokenizer 0."""
    async with httpx.AsyncClient(base_url=address, timeout=READY) as client:
        begin = time.perf_counter()
        asked = [chat(client, model, f"{QUESTIONS[n % len(QUESTIONS)]} ({n})", tokens) for n in range(streams)]
        answers = await asyncio.gather(*asked)
        seconds = time.perf_counter() - begin
    return sum(len(tokenizer.encode(text).ids) for text, _ in answers) / seconds if tokenizer else 0.0


async def first_tokens(address: str, model: str) -> float:
    """Seconds to the first text of a short prompt, the median of several."""
    fresh = httpx.Limits(max_keepalive_connections=0)  # llama.cpp's server may end a connection between two requests
    async with httpx.AsyncClient(base_url=address, timeout=READY, limits=fresh) as client:
        return statistics.median([(await chat(client, model, f"Say {n}.", 2))[1] for n in range(7)])


def measure(side: Side, result: Result, tokenizer: Tokenizer) -> None:
    """One round."""
    with running(side) as (address, _):
        result.many.append(asyncio.run(together(address, side.model, STREAMS, tokenizer)))
        result.one += [asyncio.run(together(address, side.model, 1, tokenizer)) for _ in range(ALONE)]
        result.first.append(asyncio.run(first_tokens(address, side.model)))


def forward_pass(folder: Path) -> float:
    """Seconds of one pass of transformers' model over the short prompt, the median of several."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    turns = [{"role": "user", "content": "Say 1."}]
    ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    seconds = []
    with torch.inference_mode():
        for _ in range(9):
            begin = time.perf_counter()
            model(**ids, logits_to_keep=1)
            seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


async def live(address: str, model: str, end: float, seed: int, seen: Counter[str], alone: dict[str, str]) -> None:
    """One client that asks, disconnects or sends nonsense until the end, and checks every whole answer."""
    draw = random.Random(seed)
    async with httpx.AsyncClient(timeout=READY) as client:
        while time.monotonic() < end:
            kind = draw.choice(("whole", "whole", "leave", "nonsense"))
            question = f"{draw.choice(QUESTIONS)} ({draw.randrange(8)})"
            asked = request(model, question, 24)
            if kind == "nonsense":
                answer = await client.post(f"{address}/v1/chat/completions", json=draw.choice(NONSENSE))
                seen[f"nonsense {answer.status_code // 100}xx"] += 1
            elif kind == "leave":
                async with client.stream(
                    "POST", f"{address}/v1/chat/completions", json={**asked, "stream": True, "max_tokens": 200}
                ) as response:
                    async for _ in response.aiter_lines():
                        if draw.random() < 0.3:
                            break
                seen["left"] += 1
            else:
                answer = await client.post(f"{address}/v1/chat/completions", json=asked)
                if answer.status_code in (429, 503):
                    seen["told to come later"] += 1
                    await asyncio.sleep(float(answer.headers.get("retry-after", 1)))
                    continue
                text = answer.json()["choices"][0]["message"]["content"]
                seen["as alone" if text == alone[question] else "OTHER THAN ALONE"] += 1


async def alone_answers(address: str, model: str) -> dict[str, str]:
    """The greedy answer to each question with no other request beside it."""
    found = {}
    async with httpx.AsyncClient(timeout=READY) as client:
        for question in (f"{q} ({n})" for q in QUESTIONS for n in range(8)):
            asked = {
                "model": model,
                "messages": [{"role": "user", "content": question}],
                "max_tokens": 24,
                "temperature": 0,
            }
            answer = await client.post(f"{address}/v1/chat/completions", json=asked)
            found[question] = answer.json()["choices"][0]["message"]["content"]
    return found


async def crowd(address: str, model: str, seconds: float, seen: Counter[str]) -> None:
    """All clients at once."""
    alone = await alone_answers(address, model)
    end = time.monotonic() + seconds
    await asyncio.gather(*(live(address, model, end, seed, seen, alone) for seed in range(CLIENTS)))


def soak(side: Side, minutes: float) -> None:
    """The clients in two halves; resident memory after each."""
    seen: Counter[str] = Counter()
    with running(side) as (address, server):
        memory = []
        for _ in range(2):
            asyncio.run(crowd(address, side.model, minutes * 30, seen))
            memory.append(psutil.Process(server.pid).memory_info().rss / 2**30)
        left = httpx.get(f"{address}/metrics").text
    print(f"{minutes:g} minutes, {CLIENTS} clients: {dict(sorted(seen.items()))}")
    print(f"resident after each half: {memory[0]:.2f} and {memory[1]:.2f} GiB")
    print("\n".join(line for line in left.splitlines() if "running" in line or "waiting" in line))


def serve_llama_cpp(gguf: str, port: int) -> None:
    """llama.cpp's own server, as xllamacpp ships it."""
    import xllamacpp

    parameters = xllamacpp.CommonParams()
    parameters.model.path = gguf
    parameters.hostnames, parameters.port = ["127.0.0.1"], port
    parameters.n_parallel, parameters.n_ctx = STREAMS, 2048 * STREAMS
    parameters.cpuparams.n_threads = psutil.cpu_count(logical=False) or 2
    server = xllamacpp.Server(parameters)
    print(server.listening_address, flush=True)
    signal.pause()


def model_folder(folder: Path) -> Path:
    """The catalogue's model as transformers saves it, in float32; its GGUF file's path."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from stoker.models.model_source import require_model

    gguf = Path(require_model(MODEL, folder).where)
    held = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype="float32")
    config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_config(config, dtype="float32")
    model.load_state_dict(held.state_dict())
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
    return gguf


def main() -> None:
    """Prints the table, or what the crowd saw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sides", nargs="+")
    parser.add_argument("--minutes", type=float, help="soak Stoker's server instead")
    parser.add_argument("--llama-cpp-server", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.llama_cpp_server:
        serve_llama_cpp(arguments.llama_cpp_server[0], int(arguments.llama_cpp_server[1]))
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / MODEL
        folder.mkdir()
        known = sides(folder, model_folder(folder))
        if arguments.minutes:
            soak(known["stoker"], arguments.minutes)
            return
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        results = {name: Result() for name in arguments.sides or known}
        for number in range(arguments.rounds):
            for name, result in results.items():
                measure(known[name], result, tokenizer)
                print(f"round {number + 1} {name}: {result}", file=sys.stderr, flush=True)
        passed = forward_pass(folder)
    print(f"{'':<18} {STREAMS} streams   one stream   first token")
    for name, result in results.items():
        many, one, first = (statistics.median(x) for x in (result.many, result.one, result.first))
        print(f"{name:<18} {many:7.1f} /s {one:10.1f} /s {first * 1000:9.0f} ms")
    print(f"a forward pass of the short prompt: {passed * 1000:.0f} ms")


if __name__ == "__main__":
    main()
