"""Replays prompts through a GGUF file in a fresh process, by llama.cpp itself or by transformers.

A file that loads is not yet the model that was trained. What the artifact answers, where it stops, and how
likely its first tokens were is asked of programs that share nothing with the training process:

    python -m stoker.checkpoint.gguf_replay FILE [--through llamacpp|transformers] < request.json > reply.json

llama.cpp comes as ``xllamacpp``. Its server listens on the loopback address, on a port the system picks,
behind a key made for this one process, and ends with it.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from stoker.errors import RunFailed, UserError

Program = Literal["llamacpp", "transformers"]
FORCED = 1e6  # a logit bias above all logits


@dataclass(frozen=True)
class ReplayRequest:
    """What to ask of a GGUF.

    Attributes:
        prompts: token ids, one list a prompt; nothing is added to them.
        texts: to be encoded by the file's own tokenizer; special tokens in them are recognised.
        conversations: to be rendered by the file's own chat template, ready for the assistant's turn; each a
            list of ``{"role", "content"}``.
        new_tokens: most tokens generated for each prompt.
        top: how many of the likeliest first tokens are reported.
        rows: token ids whose log-probabilities are wanted.
        positions: of each row, those after which the next token's is.
    """

    prompts: list[list[int]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    conversations: list[list[dict[str, str]]] = field(default_factory=list)
    new_tokens: int = 32
    top: int = 10
    rows: list[list[int]] = field(default_factory=list)
    positions: list[list[int]] = field(default_factory=list)


@dataclass(frozen=True)
class Continuation:
    """The greedy continuation of one prompt.

    Attributes:
        tokens: ids generated, the stop token among them.
        text: the same as text, without special tokens.
        stopped: it ended by itself, not at the limit; the last of `tokens` is then the stop token.
        first: the likeliest first tokens and their natural log-probabilities, likeliest first. llama.cpp says
            nothing about a token that ends amid a UTF-8 character; it is empty then.
    """

    tokens: list[int]
    text: str
    stopped: bool
    first: dict[int, float]


@dataclass(frozen=True)
class Replay:
    """The answers, each list in the order of its questions in the `ReplayRequest`.

    Attributes:
        scores: natural log-probabilities at a row's positions; None where llama.cpp gives none, as of a token that
            ends amid a UTF-8 character.
    """

    continuations: list[Continuation]
    encodings: list[list[int]]
    renderings: list[str]
    scores: list[list[float | None]]


def replay(gguf: Path, request: ReplayRequest, *, through: Program, timeout: float = 600) -> Replay:
    """Asks `request` of the file in a fresh process.

    Raises:
        UserError: the program is not installed.
        RunFailed: the program cannot load or run the file, or takes more than `timeout` seconds.
    """
    if through == "llamacpp" and importlib.util.find_spec("xllamacpp") is None:
        raise UserError("llama.cpp is not installed here; pip install 'stoker[llamacpp]'")
    command = [sys.executable, "-P", "-m", "stoker.checkpoint.gguf_replay", str(gguf), "--through", through]
    try:
        done = subprocess.run(
            command,
            input=json.dumps(asdict(request)),
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise RunFailed(f"{gguf}: the replay through {through} took more than {timeout:g} s") from None
    if done.returncode != 0:
        last = "\n".join(done.stderr.strip().splitlines()[-5:])
        raise RunFailed(f"{gguf} cannot be replayed through {through}:\n{last}")
    reply = json.loads(done.stdout)
    continuations = [
        Continuation(**{**c, "first": {int(token): p for token, p in c["first"].items()}})
        for c in reply["continuations"]
    ]
    return Replay(continuations, reply["encodings"], reply["renderings"], reply["scores"])


def replay_llamacpp(
    gguf: Path, prompts: list[list[int]], *, new_tokens: int = 32, top: int = 10, timeout: float = 600
) -> list[Continuation]:
    """Greedy continuations of `prompts` (token ids) by llama.cpp on the CPU; see `replay`."""
    request = ReplayRequest(prompts=prompts, new_tokens=new_tokens, top=top)
    return replay(gguf, request, through="llamacpp", timeout=timeout).continuations


def replay_transformers(
    gguf: Path, prompts: list[list[int]], *, new_tokens: int = 32, top: int = 10, timeout: float = 600
) -> list[Continuation]:
    """Greedy continuations of `prompts` (token ids) by transformers in float32; see `replay`."""
    request = ReplayRequest(prompts=prompts, new_tokens=new_tokens, top=top)
    return replay(gguf, request, through="transformers", timeout=timeout).continuations


def transformers_logits(gguf: Path, prompts: list[list[int]]) -> list[Any]:
    """Logits of every position of each prompt, as float32 tensors [L, V], by transformers in this process."""
    import torch

    model = _load_transformers(gguf)
    with torch.inference_mode():
        return [model(torch.tensor([prompt])).logits[0] for prompt in prompts]


def main(arguments: list[str] | None = None) -> None:
    """Reads a request from the standard input, writes the reply to the standard output."""
    parser = argparse.ArgumentParser(description="Replay prompts through a GGUF file; JSON in, JSON out.")
    parser.add_argument("gguf", type=Path)
    parser.add_argument("--through", choices=["llamacpp", "transformers"], default="llamacpp")
    chosen = parser.parse_args(arguments)
    request = ReplayRequest(**json.load(sys.stdin))
    # Libraries that print must not spoil the reply: while they work, the standard output is the error output.
    reply_to = os.dup(1)
    os.dup2(2, 1)
    answered = _ANSWER[chosen.through](chosen.gguf, request)
    with os.fdopen(reply_to, "w") as stream:
        json.dump(asdict(answered), stream)
    # llama.cpp's server can wait for ever for its own threads when the interpreter takes it down.
    sys.stderr.flush()
    os._exit(0)


def _through_llamacpp(gguf: Path, request: ReplayRequest) -> Replay:
    import secrets

    import xllamacpp

    longest = max([len(ids) for ids in (*request.prompts, *request.rows)], default=0)
    params = xllamacpp.CommonParams()
    params.model.path = str(gguf)
    params.n_ctx = longest + request.new_tokens + 8
    params.n_parallel = 1
    params.n_gpu_layers = 0
    params.warmup = False
    params.fit_params = False  # take the context length as it is, instead of one that fills the memory
    params.ctx_shift = False
    params.ui = False
    params.verbosity = 1  # errors only
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = _cores()
    params.cpuparams.poll = params.cpuparams_batch.poll = 0  # threads that wait by spinning stall on a busy machine
    # By default keys and values are kept in float16, which would blur the comparison with float32.
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.hostnames = ["127.0.0.1"]
    params.port = 0
    params.api_keys = [secrets.token_urlsafe(24)]
    server = xllamacpp.Server(params)
    ask = _Asker(server.listening_address, params.api_keys[0])
    return Replay(
        continuations=[_continuation(ask, prompt, request) for prompt in request.prompts],
        encodings=[
            ask("/tokenize", content=text, add_special=True, parse_special=True)["tokens"] for text in request.texts
        ],
        renderings=[ask("/apply-template", messages=turns)["prompt"] for turns in request.conversations],
        scores=[
            [_score(ask, row, position) for position in positions]
            for row, positions in zip(request.rows, request.positions, strict=True)
        ],
    )


def _score(ask: _Asker, row: list[int], position: int) -> float | None:
    """The log-probability of a row's token behind a position.

    The bias makes the sampler take that token; the log-probability that is reported is of the logits before it.
    """
    token = row[position + 1]
    asked = {"prompt": row[: position + 1], "n_predict": 1, "temperature": 0, "n_probs": 1, "cache_prompt": True}
    answer = ask("/completion", logit_bias=[[token, FORCED]], **asked)
    found = answer.get("completion_probabilities", [])
    return found[0]["logprob"] if found and found[0]["id"] == token else None


def _continuation(ask: _Asker, prompt: list[int], request: ReplayRequest) -> Continuation:
    greedy = {"prompt": prompt, "temperature": 0, "return_tokens": True, "cache_prompt": False}
    answer = ask("/completion", n_predict=request.new_tokens, **greedy)
    # Asked apart: the server says nothing about tokens that end amid a UTF-8 character, and in a longer
    # answer the next one's would stand in their place.
    opening = ask("/completion", n_predict=1, n_probs=request.top, **greedy)
    first = [choice for told in opening.get("completion_probabilities", []) for choice in told["top_logprobs"]]
    return Continuation(
        tokens=answer["tokens"],
        text=answer["content"],
        stopped=answer["stop_type"] == "eos",
        first={choice["id"]: choice["logprob"] for choice in first},
    )


@dataclass(frozen=True)
class _Asker:
    """Posts JSON to the loopback server."""

    address: str
    key: str

    def __call__(self, path: str, **body: Any) -> Any:
        from urllib.request import ProxyHandler, Request, build_opener

        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self.key}"}
        request = Request(self.address + path, json.dumps(body).encode(), headers)
        # A proxy in the environment is not for the loopback address.
        with build_opener(ProxyHandler({})).open(request) as response:
            return json.load(response)


def _through_transformers(gguf: Path, request: ReplayRequest) -> Replay:
    import torch
    from transformers import AutoTokenizer

    torch.set_num_threads(_cores())
    model = _load_transformers(gguf)
    tokenizer: Any = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, trust_remote_code=False)
    stops = _stops(gguf)
    continuations = []
    for prompt in request.prompts:
        answer = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            max_new_tokens=request.new_tokens,
            eos_token_id=stops,
            pad_token_id=stops[0],
            output_logits=True,
            return_dict_in_generate=True,
        )
        tokens = answer.sequences[0, len(prompt) :].tolist()
        top = answer.logits[0][0].float().log_softmax(-1).topk(request.top)
        continuations.append(
            Continuation(
                tokens=tokens,
                text=tokenizer.decode(tokens, skip_special_tokens=True),
                stopped=tokens[-1] in stops,
                first=dict(zip(top.indices.tolist(), top.values.tolist(), strict=True)),
            )
        )
    return Replay(
        continuations=continuations,
        encodings=[tokenizer(text)["input_ids"] for text in request.texts],
        renderings=[
            tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
            for turns in request.conversations
        ],
        scores=[
            [float(logits[p].log_softmax(-1)[row[p + 1]]) for p in positions]
            for row, positions, logits in zip(
                request.rows, request.positions, transformers_logits(gguf, request.rows), strict=True
            )
        ],
    )


def _load_transformers(gguf: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, trust_remote_code=False
    ).eval()


def _stops(gguf: Path) -> list[int]:
    """The ids that end a generation, eos first; transformers reads them for the tokenizer only."""
    from gguf import GGUFReader

    fields = GGUFReader(gguf).fields
    keys = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]
    return [int(fields[key].contents()) for key in keys if key in fields]


def _cores() -> int:
    if os.environ.get("OMP_NUM_THREADS", "").isdigit():
        return int(os.environ["OMP_NUM_THREADS"])
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


_ANSWER = {"llamacpp": _through_llamacpp, "transformers": _through_transformers}

if __name__ == "__main__":
    main()
