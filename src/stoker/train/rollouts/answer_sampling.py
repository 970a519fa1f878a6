"""Answers to prompts, sampled from the weights as they are now."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from stoker.checkpoint.collective import together
from stoker.data.order import stream_key
from stoker.generate.decoder import Decoder
from stoker.generate.engine import Engine, free_memory
from stoker.generate.request import Request, Sampling
from stoker.train.rollouts.rollout import Rollout


@dataclass(frozen=True)
class Prompt:
    """A prompt of the run.

    Attributes:
        number: in the order of the run.
        source, row: where it comes from.
    """

    number: int
    ids: np.ndarray
    source: str
    row: int


def sampled(
    decoder: Decoder,
    prompts: Sequence[Prompt],
    *,
    answers: int,
    max_tokens: int,
    temperature: float,
    stop_ids: frozenset[int],
    seed: int,
) -> list[Rollout]:
    """Answers to prompts, those to one prompt after another; a collective where the decoder's passes are.

    An answer is a function of the weights, the seed, the prompt's number and the answer's. It is sampled from the whole
    distribution: nothing is cut off, so its log-probability is that of the policy.

    Args:
        temperature: 0 for the likeliest tokens.
    """
    if decoder.device.type == "cuda":
        torch.cuda.empty_cache()  # what training has freed counts as free
    memory = min(together(lambda: free_memory(decoder.device.torch)))  # alike, so that all take the same steps
    engine = Engine(decoder, memory=memory)
    asked = [(prompt, number) for prompt in prompts for number in range(answers)]
    requests = [
        Request(
            tuple(prompt.ids.tolist()),
            max_tokens,
            Sampling(temperature=temperature, seed=stream_key(seed, 13, prompt.number, number)),
            stop_ids=stop_ids,
        )
        for prompt, number in asked
    ]
    return [
        Rollout(
            prompt.number,
            number,
            prompt.source,
            prompt.row,
            prompt.ids,
            np.asarray(generation.ids, np.uint32),
            generation.ended or "failed",
            tokens={"sampled": np.array([token.log_probability for token in generation.tokens])},
        )
        for (prompt, number), generation in zip(asked, engine.run(requests), strict=True)
    ]
