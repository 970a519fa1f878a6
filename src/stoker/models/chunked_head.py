"""Scores of targets and their gradients in chunks of positions, so that full logits never exist.

Shapes: N predicted positions, C positions of a chunk, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from stoker.models.compiled_scores import accumulator, compiled, scores_of_products, slope_of_scores

CHUNK_BYTES = 64 << 20  # of float32 logits at a time: large enough for an efficient matrix product
# On a GPU this many times the size: each chunk reads the output embedding again, which has hundreds of megabytes.
TIMES_ON_CUDA = 8
TILE = 256  # rows of the tiles of large matrix products; a chunk is a multiple of it


class VocabularySplit(Protocol):
    """Processes that each hold the output embedding's rows of a part of the vocabulary.

    Attributes:
        start: the first token of this process.
        widest: the largest number of tokens on a process, so that all use the same chunks.
    """

    start: int
    widest: int

    def maximum(self, x_C: Tensor) -> None:
        """The largest over the processes, in place."""

    def total(self, x: Tensor) -> None:
        """The sum over the processes, in place."""

    def add(self, x: Tensor) -> Tensor:
        """Returns the sum over the processes, with its gradient."""

    def gather(self, logits_NV: Tensor) -> Tensor:
        """Gathers the logits of the whole vocabulary from those of each process' part."""


@dataclass(frozen=True)
class LogitForm:
    """Scale and softcap of the logits, the processes that share the vocabulary, and compilation; see `Head`."""

    scale: float
    softcap: float | None
    across: VocabularySplit | None
    compiled: bool = False

    def compiles(self, h_CD: Tensor) -> bool:
        """Whether a chunk is compiled; those of one position would need compilations of their own."""
        return self.compiled and self.across is None and h_CD.dtype != torch.float64 and len(h_CD) > 1


class ChunkScores(NamedTuple):
    """What `scores_of_products` returns."""

    log_p_C: Tensor
    right_C: Tensor
    entropy_C: Tensor | None
    slope_CV: Tensor | None


class _Chunk:
    """The softmax of a few positions.

    Attributes:
        p_CV: exp(logit - top), not normalised.
        top_C, total_C: the largest logit, and the sum of ``p_CV``, over the whole vocabulary, shape (C, 1).
        picked_C: the target's logit, shape (C, 1).
        right_C: whether the target was the most likely token, shape (C, 1).
    """

    def __init__(
        self, h_CD: Tensor, weight: Tensor, bias: Tensor | None, t_C: Tensor, form: LogitForm, *, slope: bool
    ) -> None:
        self._form, self._dtype, across = form, h_CD.dtype, form.across
        raw_CV = nn.functional.linear(h_CD, weight, bias).to(accumulator(h_CD))
        if form.scale != 1.0:
            raw_CV.mul_(form.scale)
        self._slope_CV = None
        logits_CV = raw_CV
        if form.softcap is not None:
            logits_CV = raw_CV.div_(form.softcap).tanh_()
            self._slope_CV = logits_CV.square().neg_().add_(1) if slope else None
            logits_CV.mul_(form.softcap)
        self.top_C, best_C = logits_CV.max(dim=1, keepdim=True)
        self._t_C, self._own_C = _here(t_C[:, None], across, weight.shape[0])
        if across is not None:
            across.maximum(self.top_C)
        picked_C = logits_CV.gather(1, self._t_C)
        self.picked_C = picked_C if self._own_C is None else picked_C.where(self._own_C, 0.0)
        self.p_CV = logits_CV.sub_(self.top_C).exp_()
        self.total_C = self.p_CV.sum(dim=1, keepdim=True)
        self.right_C = best_C == self._t_C
        if across is not None:
            self.total_C, self.picked_C = _summed(across, self.total_C, self.picked_C)
            self.right_C = self.picked_C >= self.top_C

    def scores(self, *, entropy: bool, slope: bool) -> ChunkScores:
        """See `scores_of_products`. The slope is computed in place of ``p_CV``."""
        log_p_C = self.picked_C - (self.total_C.log() + self.top_C)
        entropy_C = self._entropy_C().squeeze(1) if entropy else None
        slope_CV = self._before_transform(self._minus_target()) if slope else None
        return ChunkScores(log_p_C.squeeze(1), self.right_C.squeeze(1), entropy_C, slope_CV)

    def slope_of_scores(self, slope_C: Tensor, entropy_C: Tensor | None, entropy_slope_C: Tensor | None) -> Tensor:
        """See the compiled function of this name. The slope is computed in place of ``p_CV``."""
        uncertain_CV = None
        if entropy_C is not None:
            p_CV = self.p_CV / self.total_C
            uncertain_CV = torch.xlogy(p_CV, p_CV).addcmul_(p_CV, entropy_C[:, None])
            del p_CV
        grad_CV = self._minus_target().mul_(-slope_C[:, None])
        if uncertain_CV is not None and entropy_slope_C is not None:
            grad_CV.addcmul_(uncertain_CV, entropy_slope_C[:, None], value=-1)
        return self._before_transform(grad_CV)

    def _entropy_C(self) -> Tensor:
        """The entropy of each distribution, shape (C, 1): log sum - sum of p x logit."""
        weighted_C = torch.xlogy(self.p_CV, self.p_CV).sum(dim=1, keepdim=True)
        if self._form.across is not None:
            self._form.across.total(weighted_C)
        return self.total_C.log() - weighted_C / self.total_C

    def _minus_target(self) -> Tensor:
        """``p_CV`` as probabilities less one at the target, in place: the gradient of a summed cross entropy."""
        hit_C = torch.full_like(self.total_C, -1.0) if self._own_C is None else -self._own_C.to(self.total_C.dtype)
        return self.p_CV.div_(self.total_C).scatter_add_(1, self._t_C, hit_C)

    def _before_transform(self, grad_CV: Tensor) -> Tensor:
        """Turns the gradient of the logits into that of the products, in place, and casts it to their type."""
        if self._slope_CV is not None:
            grad_CV.mul_(self._slope_CV)
        if self._form.scale != 1.0:
            grad_CV.mul_(self._form.scale)
        return grad_CV.to(self._dtype)


def _parts(hidden_ND: Tensor, weight_VD: Tensor, form: LogitForm) -> Iterator[slice]:
    """The positions of each chunk."""
    size = CHUNK_BYTES * (TIMES_ON_CUDA if hidden_ND.is_cuda else 1)
    rows = max(1, size // (4 * (weight_VD.shape[0] if form.across is None else form.across.widest)))
    if rows > TILE:
        rows -= rows % TILE
    for start in range(0, hidden_ND.shape[0], rows):
        yield slice(start, start + rows)


def scored(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    target_N: Tensor,
    form: LogitForm,
    *,
    entropy: bool,
    slope: bool,
    summed: bool,
) -> Iterator[tuple[slice, ChunkScores]]:
    """(positions, their scores), chunk by chunk; see `scores_of_products`. Only compiled chunks are summed already."""
    how = {"entropy": entropy, "slope": slope, "summed": summed}
    for part in _parts(hidden_ND, weight_VD, form):
        h_CD, t_C = hidden_ND[part], target_N[part]
        if form.compiles(h_CD):
            product_CV = nn.functional.linear(h_CD, weight_VD, bias_V)
            found = ChunkScores(*compiled(scores_of_products, product_CV, t_C, form.scale, form.softcap, **how))
            del product_CV
        else:
            found = _Chunk(h_CD, weight_VD, bias_V, t_C, form, slope=slope).scores(entropy=entropy, slope=slope)
        yield part, found
        del found  # before the next chunk's products


def score_slopes(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    target_N: Tensor,
    form: LogitForm,
    slope_N: Tensor,
    entropies: tuple[Tensor, Tensor] | None,
) -> Iterator[tuple[slice, Tensor]]:
    """(positions, the gradient of their products), chunk by chunk; see `slope_of_scores`.

    Args:
        entropies: entropies and their gradient; None if they have none.
    """
    for part in _parts(hidden_ND, weight_VD, form):
        h_CD, t_C = hidden_ND[part], target_N[part]
        of_entropy = (None, None) if entropies is None else (entropies[0][part], entropies[1][part])
        if form.compiles(h_CD):
            product_CV = nn.functional.linear(h_CD, weight_VD, bias_V)
            grad_CV = compiled(slope_of_scores, product_CV, t_C, form.scale, form.softcap, slope_N[part], *of_entropy)
            del product_CV
        else:
            grad_CV = _Chunk(h_CD, weight_VD, bias_V, t_C, form, slope=True).slope_of_scores(slope_N[part], *of_entropy)
        yield part, grad_CV
        del grad_CV  # before the next chunk's products


def _here(t_C: Tensor, across: VocabularySplit | None, size: int) -> tuple[Tensor, Tensor | None]:
    """Targets relative to this process' first token, 0 for those of others, and which are its own."""
    if across is None:
        return t_C, None
    own_C = (t_C >= across.start) & (t_C < across.start + size)
    return torch.where(own_C, t_C - across.start, 0), own_C


def _summed(across: VocabularySplit, *values_C: Tensor) -> tuple[Tensor, ...]:
    stacked = torch.stack(values_C)
    across.total(stacked)
    return stacked.unbind()
