"""Sample answers to held-out prompts, generated from time to time for people to read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from stoker.data.sequences import Document
from stoker.data.text_codec import TextCodec
from stoker.generate.request import Request
from stoker.train.engine import Engine
from stoker.train.part_passes import evaluation_mode
from stoker.train.task import Task

if TYPE_CHECKING:
    from stoker.generate.decoder import Decoder

LONGEST_PROMPT, LONGEST_ANSWER = 256, 48  # tokens
MEMORY = 2**40  # bytes: no limit for this few sequences


@dataclass(frozen=True)
class WrittenSample:
    """A prompt and the model's answer."""

    prompt: str
    answer: str


@dataclass(frozen=True)
class Sampler:
    """Held-out prompts for sample answers.

    Attributes:
        prompts: token ids, each of shape (length,).
        codec: decodes tokens, and defines the stop tokens.
        context: most tokens of a prompt with its answer; None without a limit.
    """

    prompts: tuple[np.ndarray, ...]
    codec: TextCodec
    context: int | None = None

    def samples(self, task: Task, engine: Engine) -> list[WrittenSample]:
        """Returns the greedy answer to each prompt; the same on every process."""
        decoder = engine.decoder(self.context)
        answers = self._generated(decoder) if decoder is not None else self._recomputed(task, engine)
        return [
            WrittenSample(self._text(prompt), self._text(answer))
            for prompt, answer in zip(self.prompts, answers, strict=True)
        ]

    def _generated(self, decoder: Decoder) -> list[Sequence[int]]:
        from stoker.generate.generation_engine import GenerationEngine  # imports transformers and peft

        requests = [
            Request(tuple(prompt.tolist()), LONGEST_ANSWER, stop_ids=self.codec.stop_ids) for prompt in self.prompts
        ]
        # The same memory on every process, so that all of them take the same steps. Compiling kernels that read pages
        # would take longer than these answers.
        generations = GenerationEngine(decoder, rows=len(requests), memory=MEMORY, paged=False).run(requests)
        return [generation.ids for generation in generations]

    @torch.no_grad()
    def _recomputed(self, task: Task, engine: Engine) -> list[Sequence[int]]:
        """Generates without a cache where a row is split over processes: each token takes a forward pass of all."""
        rows = list(self.prompts)
        going = list(range(len(rows)))
        with evaluation_mode(task.model):
            for _ in range(LONGEST_ANSWER):
                for index, token in zip(list(going), engine.continue_rows([rows[i] for i in going]), strict=True):
                    rows[index] = np.append(rows[index], token)
                    if token in self.codec.stop_ids or len(rows[index]) == self.context:
                        going.remove(index)
                if not going:
                    break
        return [row[len(prompt) :].tolist() for prompt, row in zip(self.prompts, rows, strict=True)]

    def _text(self, ids: Sequence[int] | np.ndarray) -> str:
        return self.codec.tokenizer.decode([int(i) for i in ids], skip_special_tokens=True).strip()


def sampler_for(
    documents: Sequence[Document], count: int, codec: TextCodec, context: int | None = None
) -> Sampler | None:
    """Returns a sampler of the first held-out documents that have a prompt; None without any.

    The prompt is the text before the first trained token; for a document that is trained whole, its first half.
    """
    prompts: list[np.ndarray] = []
    for prompt in _prompts(documents, LONGEST_PROMPT if context is None else min(LONGEST_PROMPT, context - 1)):
        if len(prompts) == count:
            break
        prompts.append(prompt)
    return Sampler(tuple(prompts), codec, context) if prompts else None


def _prompts(documents: Sequence[Document], longest: int) -> Iterator[np.ndarray]:
    for document in documents:
        ids, first = document.row.ids, len(document.row.prompt)
        length = first if first > 1 else len(ids) // 2
        if 0 < length <= longest:
            yield np.asarray(ids[:length], dtype=np.int64)
