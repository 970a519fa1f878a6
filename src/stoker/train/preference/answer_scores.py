"""Scores of whole answers by a reward model."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
from torch import nn

from stoker.grouping import grouped
from stoker.hardware.process_device import Device
from stoker.models.attention.collate import Row
from stoker.models.attention.packed_row import row_of
from stoker.models.language_model import LanguageModel, lay_out_for
from stoker.models.tuning.adapters import unwrap
from stoker.parallel.float64_mode import arithmetic_of
from stoker.train.preference.reward_objective import answer_scores, offset_of

TOKENS = 8192  # per forward pass


class Scoring(Protocol):
    """A model with a score head, in evaluation mode, on its device; a run that was opened is one."""

    @property
    def model(self) -> nn.Module: ...

    @property
    def device(self) -> Device: ...


class AnswerScores:
    """Scores prompts with their answers; demonstrations in the data of a run score 0."""

    def __init__(self, tuned: Scoring) -> None:
        self._tuned = tuned

    @cached_property
    def _language(self) -> LanguageModel:
        with arithmetic_of(self._tuned.device), self._tuned.device.autocast():
            return lay_out_for(unwrap(self._tuned.model))

    @torch.inference_mode()
    def __call__(self, rows: Sequence[Sequence[int]]) -> list[float]:
        """Returns the score at the last token of each row of token ids.

        Equal rows are read once: their place in a pass would change the rounding of their scores, and answers that are
        the same would seem to differ.
        """
        device = self._tuned.device
        places = {row: number for number, row in enumerate(dict.fromkeys(map(tuple, rows)))}
        distinct, scores = list(places), np.zeros(len(places))
        with arithmetic_of(device), device.autocast():
            for numbers in grouped(range(len(distinct)), lambda number: len(distinct[number]), TOKENS):
                for inputs in self._language.lay_out(
                    [_read_at_the_end(distinct[i]) for i in numbers], device.torch, given={"number": np.array(numbers)}
                ):
                    with row_of(inputs):
                        found = self._language.read(inputs, answer_scores)
                    scores[inputs.given["number"].tolist()] = found.cpu().double().numpy()
        return (scores - offset_of(self._tuned.model))[[places[tuple(row)] for row in rows]].tolist()


def _read_at_the_end(ids: Sequence[int]) -> Row:
    """Returns the tokens with one target after the last token, where the score is read."""
    read = np.array([*ids, ids[-1]], np.uint32)
    return read, np.arange(len(read)) == len(read) - 1
