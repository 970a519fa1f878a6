"""The engine beside transformers' two ways to generate, in one process, in turns: tokens per second.

python benchmarks/generate.py                              # SmolLM2-135M from the catalogue, 1, 4 and 16 rows
python benchmarks/generate.py --shape 1b --rows 1 16 256   # a Llama of a billion random weights, for a GPU
python benchmarks/generate.py --shape 1b --rows 64 --tokens 256 --longest 600 --sides rows pages engine

Prompts of 20 to 60 tokens, 64 new tokens each, greedy, no stop token: `generate` (static, padded on the left),
`generate_batch` (continuous batching; its cache sized by hand, as its default does not fit a small machine), and
`GenerationEngine.run`, which on a GPU reads keys from pages, by CUDA graphs; `pages` is the engine without graphs, and
`rows` without pages. Tokens of all are compared: on a CPU in float32 they are equal but for ties.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from stoker.generate.decoder import Decoder, decoder_of
from stoker.generate.generation_engine import GenerationEngine
from stoker.generate.open_model import open_model
from stoker.generate.request import Request
from stoker.hardware.process_device import choose_device

ROUNDS = 3
BILLION = {
    "vocab_size": 32000,
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 8192,
}
Answers = list[list[int]]
Way = Callable[[Decoder, list[list[int]], int], Answers]


def decoder(shape: str) -> Decoder:
    """The model of a shape on this machine's device."""
    if shape == "smollm2-135m":
        return open_model(shape, Path.cwd()).decoder
    device = choose_device()
    with torch.device(device.torch):
        model = LlamaForCausalLM._from_config(LlamaConfig(**BILLION), dtype=device.autocast_dtype or torch.float32)
    return decoder_of(model.eval(), device, context=2048)


def prompts(rows: int, vocabulary: int, longest: int) -> list[list[int]]:
    """Random prompts of different lengths."""
    generator = np.random.default_rng(rows)
    return [generator.integers(5, vocabulary, generator.integers(20, longest + 1)).tolist() for _ in range(rows)]


def by_engine(of: Decoder, asked: list[list[int]], tokens: int, **settings: bool) -> Answers:
    """This engine."""
    engine = GenerationEngine(of, **settings)
    return [generation.ids for generation in engine.run([Request(tuple(ids), tokens) for ids in asked])]


def by_generate(of: Decoder, asked: list[list[int]], tokens: int) -> Answers:
    """transformers' static generation."""
    model: Any = of.language.model
    width = max(map(len, asked))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in asked], device=model.device)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in asked], device=model.device)
    with torch.inference_mode():
        out = model.generate(input_ids=ids, attention_mask=mask, generation_config=greedy(tokens))
    return out[:, width:].tolist()


def by_generate_batch(of: Decoder, asked: list[list[int]], tokens: int) -> Answers:
    """transformers' continuous batching."""
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    model: Any = of.language.model
    before = model.config._attn_implementation
    model.set_attn_implementation("sdpa")
    pages = sum((len(row) + tokens) // 32 + 1 for row in asked)
    cache = ContinuousBatchingConfig(page_size=32, num_blocks=max(64, pages), max_batch_tokens=max(128, 4 * len(asked)))
    try:
        out = model.generate_batch(
            asked, generation_config=greedy(tokens), continuous_batching_config=cache, progress_bar=False
        )
    finally:
        model.set_attn_implementation(before)
    numbered = sorted(out.values(), key=lambda output: int(output.request_id.rsplit("_", 1)[-1]))
    return [list(output.generated_tokens) for output in numbered]


def greedy(tokens: int) -> GenerationConfig:
    """A number of tokens, whatever they are."""
    return GenerationConfig(
        max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
    )


SIDES: dict[str, Way] = {
    "engine": by_engine,
    "pages": partial(by_engine, graphs=False),
    "rows": partial(by_engine, paged=False),
    "generate": by_generate,
    "generate_batch": by_generate_batch,
}


def seconds(work: Way, of: Decoder, asked: list[list[int]], tokens: int) -> tuple[float, Answers]:
    """The time of a run, the device waited for."""
    begin = time.perf_counter()
    answers = work(of, asked, tokens)
    of.device.synchronise()
    return time.perf_counter() - begin, answers


def main() -> None:
    """Prints a line for each number of rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="smollm2-135m", choices=["smollm2-135m", "1b"])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 4, 16])
    parser.add_argument("--sides", nargs="+", default=["engine", "generate", "generate_batch"], choices=SIDES)
    parser.add_argument("--tokens", type=int, default=64, help="of an answer")
    parser.add_argument("--longest", type=int, default=60, help="tokens of a prompt")
    arguments = parser.parse_args()
    of = decoder(arguments.shape)
    model: PreTrainedModel = of.language.model
    print(f"{of.device.name}, {of.device.precision}; tokens/s, median of {ROUNDS}; ratio to the first; equal answers")
    for rows in arguments.rows:
        asked = prompts(rows, int(model.config.vocab_size), arguments.longest)
        taken: dict[str, list[float]] = {side: [] for side in arguments.sides}
        answers: dict[str, Answers] = {}
        for number in range(ROUNDS + 1):  # the first warms up
            for side in arguments.sides:
                time_, answers[side] = seconds(SIDES[side], of, asked, arguments.tokens)
                taken[side] += [time_] if number else []
                print(f"  {rows} {side} {time_:.2f} s", file=sys.stderr, flush=True)
        middle = {side: statistics.median(times) for side, times in taken.items()}
        parts = []
        for side, time_ in middle.items():
            equal = sum(a == b for a, b in zip(answers[side], answers[arguments.sides[0]], strict=True))
            rate, ratio = rows * arguments.tokens / time_, time_ / middle[arguments.sides[0]]
            parts.append(f"{side} {rate:.1f} ({ratio:.2f}; {equal}/{rows})")
        print(f"{rows:4d} rows  {'   '.join(parts)}", flush=True)


if __name__ == "__main__":
    main()
