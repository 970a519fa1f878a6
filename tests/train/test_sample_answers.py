"""Samples end where the model's positions do."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from torch import nn

from stoker.data.sequences import Document
from stoker.data.text_codec import TextCodec
from stoker.data.token_cache import Row
from stoker.train.language.sample_answers import sampler_for


class Counting:
    """Passes that always answer with the same token, and keep the longest row that they were asked about."""

    longest = 0

    def decoder(self, context: int | None) -> None:
        return None  # as where a row is spread over processes

    def continue_rows(self, rows: Sequence[np.ndarray]) -> list[int]:
        self.longest = max(self.longest, *map(len, rows))
        return [300] * len(rows)


def document(prompt: int) -> Document:
    ids = np.arange(prompt + 2, dtype=np.int32) % 200 + 10
    trained = np.zeros(len(ids), dtype=bool)
    trained[prompt:] = True
    return Document(Row(ids, trained), 0, 0)


def test_a_document_that_is_trained_whole_is_continued_from_its_half(chatml: TextCodec) -> None:
    whole = Document(Row(np.arange(20, dtype=np.int32), np.ones(20, dtype=bool)), 0, 0)
    sampler = sampler_for([whole, document(5)], 2, chatml)
    assert sampler is not None and [len(prompt) for prompt in sampler.prompts] == [10, 5]


def test_an_answer_stays_within_the_positions(chatml: TextCodec) -> None:
    sampler = sampler_for([document(30), document(10), document(20)], 3, chatml, context=24)
    assert sampler is not None and [len(prompt) for prompt in sampler.prompts] == [10, 20]
    passes: Any = Counting()
    task: Any = SimpleNamespace(model=nn.Identity())
    assert len(sampler.samples(task, passes)) == 2
    assert passes.longest == 23  # a row of 24 is full
