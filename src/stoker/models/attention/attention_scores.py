"""The options of attention between scores and weights: scaling, window, softcap, sinks, ALiBi, selected keys."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor


@dataclass(frozen=True)
class AttentionScores:
    """How a layer computes attention weights from the products of queries and keys.

    Attributes:
        scaling: factor of the products; None for 1 / sqrt(head size).
        window: number of keys that a query sees, its own included; None for all.
        chunk: tokens of the chunks of a document that do not attend to each other (Llama 4); None for one chunk.
        softcap: bound of the scores (Gemma 2).
        sinks_H: logit of each head's attention sink (GPT-OSS).
        slopes: ALiBi slope of each head (BLOOM).
        indices_BTN: the keys that a query sees, of those up to its own (DeepSeek V3.2); None for all.
    """

    dropout: float = 0.0
    scaling: float | None = None
    window: int | None = None
    softcap: float | None = None
    sinks_H: Tensor | None = None
    slopes: tuple[float, ...] | None = None
    chunk: int | None = None
    indices_BTN: Tensor | None = None

    @property
    def are_fused(self) -> bool:
        """Whether torch's scaled dot-product attention supports them, given a mask."""
        return self.softcap is None and self.sinks_H is None

    @property
    def are_plain(self) -> bool:
        """Whether flash attention supports them."""
        return self.are_fused and self.slopes is None and self.indices_BTN is None and not self.dropout

    def of_heads(self, own: slice) -> AttentionScores:
        """Returns the options for a slice of the query heads."""
        return replace(
            self,
            slopes=self.slopes[own] if self.slopes is not None else None,
            sinks_H=self.sinks_H[own] if self.sinks_H is not None else None,
        )
