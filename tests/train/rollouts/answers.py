"""Answers written by hand, with the values of their tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stoker.train.rollouts.rollout import Rollout

LENGTHS = (3, 5, 1, 2, 4, 4)  # of answers to two prompts
SCORES = (1.0, 0.0, 4.0, -2.0, 0.5, 0.0)


def answer(length: int, *, score: float = 0.0, stopped: bool = True, prompt: int = 0, seed: int = 0) -> Rollout:
    """An answer whose tokens have random values."""
    random = np.random.default_rng((seed, length))
    tokens = {name: -2.0 + random.normal(size=length) for name in ("old", "reference", "value")}
    ids = np.arange(length)
    return Rollout(prompt, 0, "file", 1, ids, ids, "stop" if stopped else "length", {"one": score}, score, tokens)


def answers(lengths: Sequence[int] = LENGTHS, scores: Sequence[float] = SCORES) -> list[Rollout]:
    """Answers to two prompts, the first half to the first."""
    half = len(lengths) // 2
    return [
        answer(length, score=score, prompt=i // half, seed=i)
        for i, (length, score) in enumerate(zip(lengths, scores, strict=True))
    ]
