"""Sampling of answers to prompts from the current weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from stoker.checkpoint.object_collectives import run_on_all_ranks
from stoker.data.order import stream_key
from stoker.generate.decoder import Decoder, cast_weights
from stoker.generate.generation_engine import GenerationEngine, free_memory
from stoker.generate.request import Ending, Request, Sampling
from stoker.train.rollouts.environment import Reply, Turns
from stoker.train.rollouts.rollout import Rollout


@dataclass(frozen=True)
class Prompt:
    """A prompt of the run.

    Attributes:
        number: index in the order of the run.
        source, row: origin of the prompt.
    """

    number: int
    ids: np.ndarray
    source: str
    row: int


@dataclass
class Episode:
    """An unfinished answer; of several turns where an environment replies to the model.

    Attributes:
        ids: tokens after the prompt.
        own: whether each of them was sampled by the model.
        sampled: log-probabilities of the sampled ones.
        turns: turns after the prompt, without the model's last one.
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
        """Tokens of the model's last turn."""
        begin = next((i + 1 for i in reversed(range(len(self.own))) if not self.own[i]), 0)
        return self.ids[begin:]

    def rollout(self) -> Rollout:
        """Converts the answer for training."""
        prompt = self.prompt
        return Rollout(
            prompt=prompt.number,
            sample=self.number,
            source=prompt.source,
            row=prompt.row,
            prompt_ids=prompt.ids,
            answer_ids=np.asarray(self.ids, np.uint32),
            ended=self.ended,
            tokens={"sampled": np.array(self.sampled)},
            own=None if all(self.own) else np.array(self.own),
        )


Continue = Callable[[Sequence[Episode]], Sequence[Reply | None] | None]
"""Maps unfinished episodes to what follows: their new turns, the model's included, and the tokens of the reply. None
for an episode that has ended; returns None if all have ended on every process. A collective.
"""


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
    """Samples answers to prompts, grouped by prompt; a collective where the decoder's passes are.

    An answer depends on the weights, the seed, the prompt's number and the answer's number alone. It is sampled from
    the full distribution, without truncation, so its log-probability is the policy's.

    Args:
        max_tokens: most tokens that the model samples for an answer, over all of its turns.
        temperature: sampling temperature; 0 for greedy decoding.
        go_on: returns what follows a turn of the model.
    """
    if decoder.device.type == "cuda":
        torch.cuda.empty_cache()  # memory that training has freed counts as free
    memory = min(
        run_on_all_ranks(lambda: free_memory(decoder.device.torch))
    )  # equal on all, so that all take the same steps
    cast = cast_weights(decoder, memory)  # the weights do not change here
    if cast is not None:
        decoder, memory = replace(decoder, cast=cast), memory - cast.nbytes
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
        for episode, reply in zip(waiting, following, strict=True):
            if reply is None:
                continue
            length = len(episode.prompt.ids) + len(episode.ids) + len(reply.ids)
            if decoder.context is not None and length >= decoder.context:
                episode.ended = "length"
                continue
            episode.turns += reply.turns
            episode.ids += reply.ids
            episode.own += [False] * len(reply.ids)
            active.append(episode)
