"""Replays questions through llama.cpp, in a fresh process that shares nothing with the training process.

Run as ``python -m stoker.checkpoint.export.gguf_replay FILE``, this file is that process: it reads the request as JSON
from stdin and writes the answers as JSON to stdout.

llama.cpp is installed as ``xllamacpp``. Its server listens on the loopback address, on a port that the system picks,
protected by a key generated for this one process, and ends with it.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stoker.errors import RunFailed
from stoker.hardware.processor import available_cores

if TYPE_CHECKING:  # it imports torch, which the fresh process does not need
    from stoker.checkpoint.export.replay import ReplayRequest

FORCED = 1e6  # a logit bias above all logits
LISTED = (1_000, 1_000_000)  # likeliest tokens in a list: most wanted tokens are among the first, all in the second


@dataclass(frozen=True)
class GgufAnswers:
    """Results of a program for a GGUF file; each list is in the order of the request.

    Attributes:
        tokens: the greedy continuation of each prompt.
        scores: the natural log-probability of each target.
        texts: ids of each text, special tokens not added.
        rendered: each conversation as text, ready for the next answer.
    """

    tokens: list[list[int]]
    scores: list[list[float]]
    texts: list[list[int]]
    rendered: list[str]


def ask_llamacpp(gguf: Path, request: ReplayRequest) -> GgufAnswers:
    """Replays a request through llama.cpp on the CPU, in a fresh process.

    Raises:
        RunFailed: llama.cpp cannot load or run the file, or takes more than `replay.time_limit`.
    """
    from stoker.checkpoint.export.replay import NEW_TOKENS, ask_afresh, time_limit

    asked = asdict(request) | {"new_tokens": NEW_TOKENS}
    done = ask_afresh("stoker.checkpoint.export.gguf_replay", gguf, asked, time_limit(gguf, None))
    if done.returncode != 0:
        last = "\n".join(done.stderr.strip().splitlines()[-5:])
        raise RunFailed(f"{gguf} cannot be replayed through llama.cpp:\n{last}")
    return GgufAnswers(**json.loads(done.stdout))


def _main(gguf: str) -> None:
    asked = json.load(sys.stdin)
    # Printing libraries must not corrupt the reply: meanwhile standard output is redirected to standard error.
    reply_to = os.dup(1)
    os.dup2(2, 1)
    answers = _answer(gguf, asked)
    with os.fdopen(reply_to, "w") as stream:
        json.dump(asdict(answers), stream)
    # llama.cpp's server may wait forever for its own threads at interpreter exit.
    sys.stderr.flush()
    os._exit(0)


def _answer(gguf: str, asked: dict[str, Any]) -> GgufAnswers:
    import secrets

    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = gguf
    params.n_ctx = max([len(q["ids"]) for q in asked["questions"]], default=0) + asked["new_tokens"] + 8
    params.n_parallel = 1
    params.n_gpu_layers = 0
    params.warmup = False
    params.fit_params = False  # use the given context length instead of one that fills the memory
    params.ctx_shift = False
    params.ui = False
    params.verbosity = 1  # errors only
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = _cores()
    params.cpuparams.poll = params.cpuparams_batch.poll = 0  # spinning threads stall on a busy machine
    # The default float16 cache of keys and values would blur the comparison with float32.
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.hostnames = ["127.0.0.1"]
    params.port = 0
    params.api_keys = [secrets.token_urlsafe(24)]
    server = xllamacpp.Server(params)
    ask = partial(_post, server.listening_address, params.api_keys[0])
    whole = ask("/tokenize", content=".")["tokens"][-1]
    greedy = {"n_predict": asked["new_tokens"], "temperature": 0, "return_tokens": True, "cache_prompt": False}
    return GgufAnswers(
        tokens=[ask("/completion", prompt=q["ids"][: q["prompt"]], **greedy)["tokens"] for q in asked["questions"]],
        scores=[[_score(ask, q["ids"], position, whole) for position in q["positions"]] for q in asked["questions"]],
        texts=[ask("/tokenize", content=t, add_special=False, parse_special=True)["tokens"] for t in asked["texts"]],
        rendered=[ask("/apply-template", messages=turns)["prompt"] for turns in asked["conversations"]],
    )


def _score(ask: Callable[..., Any], row: list[int], position: int, whole: int) -> float:
    """Returns the log-probability of a row's token after a position.

    The bias makes the sampler choose that token; the reported log-probability is of the logits before the bias.
    llama.cpp reports nothing for a token that ends inside a UTF-8 character. Its log-probability is read from the list
    of the likeliest tokens of a second request, whose sampler chooses ``whole``, a token of whole characters.
    """
    token = row[position + 1]
    asked = {"prompt": row[: position + 1], "n_predict": 1, "temperature": 0, "cache_prompt": True}
    for chosen, count in ((token, 1), *((whole, count) for count in LISTED)):
        answer = ask("/completion", logit_bias=[[chosen, FORCED]], n_probs=count, **asked)
        for reported in answer.get("completion_probabilities", []):
            for found in (reported, *reported["top_logprobs"]):
                if found["id"] == token:
                    return math.nan if found["logprob"] is None else float(found["logprob"])
    raise RuntimeError(f"llama.cpp reports no probability of token {token}")


def _post(address: str, key: str, path: str, **body: Any) -> Any:
    """Posts JSON to the loopback server; returns its answer."""
    from urllib.request import ProxyHandler, Request, build_opener

    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    request = Request(address + path, json.dumps(body).encode(), headers)
    # A proxy in the environment does not apply to the loopback address.
    with build_opener(ProxyHandler({})).open(request) as response:
        return json.load(response)


def _cores() -> int:
    asked = os.environ.get("OMP_NUM_THREADS", "")
    return int(asked) if asked.isdigit() else available_cores()


if __name__ == "__main__":
    _main(sys.argv[1])
