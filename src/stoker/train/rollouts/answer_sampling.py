"""Answers to prompts, sampled from the weights as they are now."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from stoker.checkpoint.collective import together
from stoker.data.order import stream_key
from stoker.generate.decoder import Decoder
from stoker.generate.generation_engine import GenerationEngine, free_memory
from stoker.generate.request import Ending, Request, Sampling
from stoker.train.rollouts.environment import Turns
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


@dataclass
class Episode:
    """An answer in the making; of several turns where an environment says what follows one.

    Attributes:
        ids: after the prompt.
        own: which of them the model has drawn.
        sampled: their log-probabilities.
        turns: after the prompt, without the model's last one.
    """

    prompt: Prompt
    number: int
    ids: list[int] = field(default_factory=list)
    own: list[bool] = field(default_factory=list)
    sampled: list[float] = field(default_factory=list)
    turns: Turns = field(default_factory=list)
    ended: Ending = "length"

    @property
    def last_turn(self) -> list[int]:
        """The tokens of the model's last turn."""
        begin = next((i + 1 for i in reversed(range(len(self.own))) if not self.own[i]), 0)
        return self.ids[begin:]

    def rollout(self) -> Rollout:
        """The answer, for training."""
        prompt = self.prompt
        return Rollout(
            prompt.number,
            self.number,
            prompt.source,
            prompt.row,
            prompt.ids,
            np.asarray(self.ids, np.uint32),
            self.ended,
            tokens={"sampled": np.array(self.sampled)},
            own=None if all(self.own) else np.array(self.own),
        )


Continue = Callable[[Sequence[Episode]], Sequence[tuple[int, ...] | None] | None]
"""What follows episodes that may go on: tokens, or None for the end of one; None where all of them have ended, on every
process. A collective."""


def sampled(
    decoder: Decoder,
    prompts: Sequence[Prompt],
    *,
    answers: int,
    max_tokens: int,
    temperature: float,
    stop_ids: frozenset[int],
    seed: int,
    go_on: Continue | None = None,
) -> list[Episode]:
    """Answers to prompts, those to one prompt after another; a collective where the decoder's passes are.

    An answer is a function of the weights, the seed, the prompt's number and the answer's. It is sampled from the whole
    distribution: nothing is cut off, so its log-probability is that of the policy.

    Args:
        max_tokens: that the model draws for an answer, over all of its turns.
        temperature: 0 for the likeliest tokens.
        go_on: what follows a turn of the model.
    """
    if decoder.device.type == "cuda":
        torch.cuda.empty_cache()  # what training has freed counts as free
    memory = min(together(lambda: free_memory(decoder.device.torch)))  # alike, so that all take the same steps
    engine = GenerationEngine(decoder, memory=memory)
    episodes = [Episode(prompt, number) for prompt in prompts for number in range(answers)]
    active, turn = episodes, 0
    while True:
        requests = [
            Request(
                (*episode.prompt.ids.tolist(), *episode.ids),
                max_tokens - sum(episode.own),
                Sampling(
                    temperature=temperature,
                    seed=stream_key(seed, 13, episode.prompt.number, episode.number, *([turn] if turn else [])),
                ),
                stop_ids=stop_ids,
            )
            for episode in active
        ]
        for episode, generation in zip(active, engine.run(requests), strict=True):
            episode.ids += generation.ids
            episode.own += [True] * len(generation.ids)
            episode.sampled += [token.log_probability for token in generation.tokens]
            episode.ended = generation.ended or "failed"
        if go_on is None:
            return episodes
        waiting = [e for e in active if e.ended == "stop" and sum(e.own) < max_tokens]
        following = go_on(waiting)
        if following is None:
            return episodes
        active, turn = [], turn + 1
        for episode, ids in zip(waiting, following, strict=True):
            if ids is None:
                continue
            if decoder.context is not None and len(episode.prompt.ids) + len(episode.ids) + len(ids) >= decoder.context:
                episode.ended = "length"
                continue
            episode.ids += ids
            episode.own += [False] * len(ids)
            active.append(episode)
