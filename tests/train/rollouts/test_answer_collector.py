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
