"""Scores of answers: the passes are on the device, their bookkeeping on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stoker.models.attention.collate import Inputs, Row, pack
from stoker.train.engine import Counts
from stoker.train.rollouts.answer_collector import AnswerCollector
from stoker.train.rollouts.answer_sampling import Episode, Prompt
from stoker.train.rollouts.environment import Reply, Turns
from stoker.train.rollouts.rollout import Rollout
from stoker.train.task import Part

META = torch.device("meta")


def laid_out(rows: Sequence[Row], device: torch.device, *, share: bool, given: Any) -> list[Inputs]:
    numbers = {name: torch.as_tensor(values) for name, values in given.items()}
    return [replace(pack(rows, device, share=share), given=numbers)]


def test_scores_find_their_answers_without_reading_from_the_device() -> None:
    """Tensors on the meta device cannot be read, and a GPU's make the host wait."""
    answers = [[5], [6, 7, 8], [4, 2], [3]]
    rollouts = [
        Rollout(
            prompt=0,
            sample=i,
            source="",
            row=0,
            prompt_ids=np.array([1, 9, i], np.uint32),
            answer_ids=np.array(ids, np.uint32),
            ended="stop",
            tokens={},
        )
        for i, ids in enumerate(answers)
    ]
    passes: list[int] = []

    def read(parts: Sequence[Part], *_: Any, tuned: bool = True) -> list[Tensor]:
        assert {part.row.ids.device for part in parts} == {META}
        passes.append(len(parts))
        of_part = [answers[start] + answers[start + 1] for start in (0, 2)]
        return [torch.tensor([ids, ids] if tuned else [ids], dtype=torch.float64) for ids in of_part]

    engine: Any = SimpleNamespace(
        share=lambda first, last, _: (first, last),
        count=lambda parts: Counts(0, 0, len(parts), 0),
        gather=lambda mine: mine(),
        read=read,
    )
    task: Any = SimpleNamespace(device=META, language=SimpleNamespace(dropout=False, lay_out=laid_out))
    settings: Any = SimpleNamespace(kl=0.1, critic=False, temperature=1.0, plan=SimpleNamespace(rollouts=4))
    unused: Any = None
    collector = AnswerCollector(task, settings, unused, unused, context=64, seed=0, micro_batch=2)
    collector.score_tokens(rollouts, engine)
    assert passes == [2, 2]
    for name in ("old", "entropy", "reference"):
        assert [rollout.tokens[name].tolist() for rollout in rollouts] == answers


def test_an_environment_gets_all_turns_of_an_answer() -> None:
    asked: list[list[str]] = []

    def reply(messages: Turns, *_: Any) -> Reply:
        asked.append([message["content"] for message in messages])
        told = f"told {len(asked)}"
        return Reply([{"role": "user", "content": told}], (1,))

    document: Any = SimpleNamespace(source=0)
    row: Any = SimpleNamespace(turns=({"role": "user", "content": "asked"},))
    environment: Any = reply
    environment.turns = 3
    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(vocab_size=8))
    task: Any = SimpleNamespace(language=SimpleNamespace(model=SimpleNamespace(config=config)))
    codec: Any = SimpleNamespace(tokenizer=SimpleNamespace(decode=lambda ids, **_: f"said {ids[0]}"))
    engine: Any = SimpleNamespace(gather=lambda mine: mine())
    unused: Any = None
    collector = AnswerCollector(
        task, unused, unused, codec, context=64, seed=0, micro_batch=1, environment=environment
    )  # fmt: skip
    go_on = collector._going_on([row], [(0, document)], engine)
    episode = Episode(Prompt(0, np.array([3]), "", 0), 0, [5], [True])
    for ids in ([6], [7]):
        (following,) = go_on([episode]) or ()
        assert following is not None
        episode.turns += following.turns
        episode.ids, episode.own = ids, [True]
    assert asked == [["asked", "said 5"], ["asked", "said 5", "told 1", "said 6"]]
    assert go_on([episode]) is None
