"""Prefill of prompts, in pieces, in a separate cache.

Shapes: B prompts, C columns, T tokens of a piece, N positions, D width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from stoker.generate.decoder import Decoder
from stoker.generate.request import Generation, Token
from stoker.generate.row_cache import Kept, RowCache
from stoker.generate.sampling import alternatives, next_tokens

PASS = 2048  # most tokens per pass, including padding
SCORED = 128  # prompt positions whose logits are in memory at once


@dataclass
class PendingPrompt:
    """A prompt with all generations that start with it; without any, a common prefix of others.

    Attributes:
        ids: virtual tokens, prompt, and the answer so far. Virtual tokens that exist as keys and values only have
            negative ids.
        known: keys and values of its first tokens.
        known_tokens: number of these tokens.
        virtual: number of virtual tokens.
    """

    ids: np.ndarray
    known: Kept | None
    known_tokens: int
    virtual: int
    generations: list[Generation]

    @property
    def new(self) -> int:
        """Number of tokens to compute."""
        return len(self.ids) - self.known_tokens

    @property
    def scored(self) -> Generation | None:
        """The generation whose prompt is scored; such a prompt has no other."""
        return self.generations[0] if self.generations and self.generations[0].unscored else None


class Prefill:
    """Prompts in one prefill, padded on the left to the longest, in an empty cache."""

    def __init__(self, adapter: str | None, prompts: list[PendingPrompt], cache: RowCache) -> None:
        self.adapter, self.prompts = adapter, prompts
        self.cache = cache
        self.cache.open([len(p.ids) for p in prompts], [p.known for p in prompts])
        self._ids_BC = np.zeros((len(prompts), max(len(p.ids) for p in prompts)), dtype=np.int64)
        for row, prompt in enumerate(prompts):
            self._ids_BC[row, self._ids_BC.shape[1] - len(prompt.ids) :] = np.maximum(prompt.ids, 0)

    @property
    def left(self) -> int:
        """Columns left to compute."""
        return self._ids_BC.shape[1] - self.cache.end

    @property
    def drawing(self) -> list[tuple[int, Generation]]:
        """The `rows` that need a first token."""
        return [(row, generation) for row, generation in self.rows if generation.request.max_tokens]

    @property
    def rows(self) -> list[tuple[int, Generation]]:
        """The generations, each with the row of its prompt."""
        return [(row, g) for row, prompt in enumerate(self.prompts) for g in prompt.generations]

    def run(self, decoder: Decoder, tokens: int) -> list[Token]:
        """Computes a piece of about this many tokens; after the last piece, returns the first tokens of `drawing`."""
        first = self.cache.end
        width = min(self.left, max(1, tokens // len(self.prompts)))
        ids_BT = torch.from_numpy(self._ids_BC[:, first : first + width]).to(decoder.device.torch)
        last = width == self.left

        def read(hidden_BTD: Tensor) -> list[Token]:
            for row, prompt in enumerate(self.prompts):
                if prompt.scored is not None:
                    _score(decoder, prompt, self.cache.starts[row], first, hidden_BTD[row])
            if not last or not self.drawing:
                return []
            logits_NV = decoder.logits(hidden_BTD[[row for row, _ in self.drawing], -1])
            return next_tokens(logits_NV, [generation for _, generation in self.drawing])

        return decoder.run(ids_BT, self.cache, read)


def _score(decoder: Decoder, prompt: PendingPrompt, start: int, first: int, hidden_TD: Tensor) -> None:
    """Adds the log-probabilities of the prompt's tokens that this piece predicts.

    Args:
        start: column of the prompt's first token.
        first: column of the piece's first token.
    """
    generation = prompt.scored
    assert generation is not None
    ids = np.asarray(generation.request.prompt)
    start += prompt.virtual  # column of the first token that is not virtual
    begins, ends = start + generation.request.score_from - 1, start + len(ids) - 1
    columns = range(max(first, begins), min(first + len(hidden_TD), ends))
    for begin in range(columns.start, columns.stop, SCORED):
        end = min(begin + SCORED, columns.stop)
        logits_NV = decoder.logits(hidden_TD[begin - first : end - first])
        log_p_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32)).log_softmax(-1)
        targets_N = torch.from_numpy(ids[begin - start + 1 : end - start + 1]).to(log_p_NV.device)
        scores = log_p_NV.gather(1, targets_N[:, None]).squeeze(1).tolist()
        others = alternatives(log_p_NV, generation.request.alternatives)
        generation.scored += [Token(*token) for token in zip(targets_N.tolist(), scores, others, strict=True)]
