"""The autograd functions of a language-model head, in chunks of positions, so that full logits never exist.

Shapes: N predicted positions, C positions of a chunk, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from stoker.hardware.process_device import is_nvidia

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


def transform(logits: Tensor, softcap: float | None) -> Tensor:
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


@dataclass(frozen=True)
class LogitForm:
    """Scale and softcap of the logits, the processes that share the vocabulary, and compilation; see `Head`."""

    scale: float
    softcap: float | None
    across: VocabularySplit | None
    compiled: bool = False


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
        self._form, across = form, form.across
        raw_CV = nn.functional.linear(h_CD, weight, bias).to(_accumulator(h_CD))
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

    @property
    def log_total_C(self) -> Tensor:
        """The logarithm of the sum of the exponentials of all logits, shape (C, 1)."""
        return self.total_C.log() + self.top_C

    def entropy_C(self) -> Tensor:
        """Returns the entropy of each distribution, shape (C, 1): log sum - sum of p x logit."""
        weighted_C = torch.xlogy(self.p_CV, self.p_CV).sum(dim=1, keepdim=True)
        if self._form.across is not None:
            self._form.across.total(weighted_C)
        return self.total_C.log() - weighted_C / self.total_C

    def minus_target(self) -> Tensor:
        """``p_CV`` as probabilities less one at the target, in place: the gradient of a summed cross entropy."""
        hit_C = torch.full_like(self.total_C, -1.0) if self._own_C is None else -self._own_C.to(self.total_C.dtype)
        return self.p_CV.div_(self.total_C).scatter_add_(1, self._t_C, hit_C)

    def before_transform(self, grad_CV: Tensor) -> Tensor:
        """Turns the gradient of the logits into that of the products, in place."""
        if self._slope_CV is not None:
            grad_CV.mul_(self._slope_CV)
        if self._form.scale != 1.0:
            grad_CV.mul_(self._form.scale)
        return grad_CV


def cross_entropy_of_products(
    product_CV: Tensor, t_C: Tensor, scale: float, softcap: float | None, *, slope: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Loss, number of correct predictions and gradient of the products, as `_Chunk` computes them.

    It changes no tensor in place, so that torch.compile makes it two passes over the products.

    Args:
        slope: whether the gradient is computed.
    """
    logits_CV = transform(product_CV.to(_accumulator(product_CV)) * scale, softcap)
    top_C, best_C = logits_CV.max(dim=1, keepdim=True)
    p_CV = (logits_CV - top_C).exp()
    total_C = p_CV.sum(dim=1, keepdim=True)
    picked_C = logits_CV.gather(1, t_C[:, None])
    loss, correct = (total_C.log() + top_C - picked_C).sum(), (best_C == t_C[:, None]).sum()
    if not slope:
        return loss, correct, None
    hit_CV = t_C[:, None] == torch.arange(product_CV.shape[1], device=t_C.device)
    grad_CV = (p_CV / total_C - hit_CV.to(p_CV.dtype)) * scale
    if softcap is not None:
        grad_CV = grad_CV * (1 - (logits_CV / softcap) ** 2)
    return loss, correct, grad_CV.to(product_CV.dtype)


@cache
def _compiled() -> Callable[..., tuple[Tensor, Tensor, Tensor | None]]:
    return torch.compile(cross_entropy_of_products, fullgraph=True)


def _compiled_loss(
    h_CD: Tensor, weight: Tensor, bias: Tensor | None, t_C: Tensor, form: LogitForm, *, slope: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    product_CV = nn.functional.linear(h_CD, weight, bias)
    for tensor in (product_CV, t_C):  # the vocabulary stays static, so that rows are known to be aligned
        torch._dynamo.maybe_mark_dynamic(tensor, 0)
    return _compiled()(product_CV, t_C, form.scale, form.softcap, slope=slope)


class _Sums:
    """The gradients of hidden states, weight and bias, accumulated over chunks; None for those not needed."""

    def __init__(self, hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, wanted: Sequence[bool]) -> None:
        wide = _accumulator(hidden_ND)
        self.hidden = torch.empty_like(hidden_ND) if wanted[0] else None
        self.weight = torch.zeros_like(weight_VD, dtype=wide) if wanted[1] else None
        self.bias = torch.zeros_like(bias_V, dtype=wide) if wanted[2] and bias_V is not None else None

    def add(self, part: slice, grad_CV: Tensor, h_CD: Tensor, weight: Tensor) -> None:
        """Adds the gradients of a chunk's products."""
        if self.hidden is not None:
            torch.mm(grad_CV, weight, out=self.hidden[part])
        if self.weight is not None:
            _add_product(self.weight, grad_CV.T, h_CD)
        if self.bias is not None:  # the sum of the rows as a product: torch's own needs scratch memory on a GPU
            _add_product(self.bias[None], grad_CV.new_ones(1, len(grad_CV)), grad_CV)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Adds a product to sums of the same or a wider dtype."""
    if is_nvidia(total.device) and total.dtype != a.dtype:
        # Products of 16 bits, summed in 32: a conversion first would multiply in float32, many times as slow.
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))


def _parts(hidden_ND: Tensor, weight_VD: Tensor, form: LogitForm) -> Iterator[slice]:
    """The positions of each chunk."""
    size = CHUNK_BYTES * (TIMES_ON_CUDA if hidden_ND.is_cuda else 1)
    rows = max(1, size // (4 * (weight_VD.shape[0] if form.across is None else form.across.widest)))
    if rows > TILE:
        rows -= rows % TILE
    for start in range(0, hidden_ND.shape[0], rows):
        yield slice(start, start + rows)


def _chunks(
    hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, target_N: Tensor, form: LogitForm, *, slope: bool
) -> Iterator[tuple[slice, Tensor, _Chunk]]:
    """(positions, their hidden states, their logits), chunk by chunk."""
    for part in _parts(hidden_ND, weight_VD, form):
        yield part, hidden_ND[part], _Chunk(hidden_ND[part], weight_VD, bias_V, target_N[part], form, slope=slope)


def _losses(
    hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, target_N: Tensor, form: LogitForm, *, slope: bool
) -> Iterator[tuple[slice, Tensor, Tensor, Tensor | None]]:
    """(positions, summed loss, correct predictions, gradient of the products), chunk by chunk."""
    if form.compiled and form.across is None and hidden_ND.dtype != torch.float64:
        for part in _parts(hidden_ND, weight_VD, form):
            yield part, *_compiled_loss(hidden_ND[part], weight_VD, bias_V, target_N[part], form, slope=slope)
        return
    for part, h_CD, chunk in _chunks(hidden_ND, weight_VD, bias_V, target_N, form, slope=slope):
        loss, correct = (chunk.log_total_C - chunk.picked_C).sum(), chunk.right_C.sum()
        grad_CV = chunk.before_transform(chunk.minus_target()).to(h_CD.dtype) if slope else None
        yield part, loss, correct, grad_CV
        del chunk, grad_CV  # before the next chunk's products


class CrossEntropy(torch.autograd.Function):
    """Computes the gradient of the hidden states (and of a trained head) together with the loss.

    The gradient of a cross entropy with respect to its logits is softmax - onehot, which needs only the chunk's own
    logits; so the backward pass recomputes nothing.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        target_N: Tensor,
        form: LogitForm,
        grad_enabled: bool,  # always off inside a Function, and needs_input_grad ignores it
    ) -> tuple[Tensor, Tensor]:
        wanted = [grad_enabled and needed for needed in ctx.needs_input_grad[:3]]
        weight, bias = _in_type_of(hidden_ND, weight_VD, bias_V)
        loss = torch.zeros((), dtype=_accumulator(hidden_ND), device=hidden_ND.device)
        correct = torch.zeros((), dtype=torch.int64, device=hidden_ND.device)
        sums = _Sums(hidden_ND, weight_VD, bias_V, wanted)
        for part, summed, right, grad_CV in _losses(hidden_ND, weight, bias, target_N, form, slope=any(wanted)):
            loss += summed
            correct += right
            if grad_CV is not None:
                sums.add(part, grad_CV, hidden_ND[part], weight)
            del grad_CV  # before the next chunk's products
        ctx.sums = sums
        ctx.dtypes = (weight_VD.dtype, bias_V.dtype if bias_V is not None else None)
        ctx.mark_non_differentiable(correct)
        return loss, correct

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        # Not modified: a zero-bubble schedule calls this twice, for the hidden states and then for the weights.
        hidden, weight, bias = ctx.sums.hidden, ctx.sums.weight, ctx.sums.bias
        return (
            hidden * grad_loss if hidden is not None else None,
            (weight * grad_loss).to(ctx.dtypes[0]) if weight is not None else None,
            (bias * grad_loss).to(ctx.dtypes[1]) if bias is not None else None,
            None,
            None,
            None,
        )


class Scores(torch.autograd.Function):
    """Log-probabilities of targets and entropies; the backward pass recomputes each chunk's logits.

    With p the probabilities and H the entropy: d log p_t / d logit = onehot - p, and d H / d logit = -p (log p + H).
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        target_N: Tensor,
        form: LogitForm,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        weight, bias = _in_type_of(hidden_ND, weight_VD, bias_V)
        log_probability_N = hidden_ND.new_zeros(hidden_ND.shape[0], dtype=_accumulator(hidden_ND))
        entropy_N = torch.zeros_like(log_probability_N) if with_entropy else log_probability_N.new_zeros(0)
        for part, _, chunk in _chunks(hidden_ND, weight, bias, target_N, form, slope=False):
            log_probability_N[part] = (chunk.picked_C - chunk.log_total_C).squeeze(1)
            if with_entropy:
                entropy_N[part] = chunk.entropy_C().squeeze(1)
            del chunk  # before the next one's products
        ctx.save_for_backward(hidden_ND, weight_VD, bias_V, target_N, entropy_N)
        ctx.form = form
        ctx.set_materialize_grads(False)  # an entropy that is only reported costs nothing here
        return log_probability_N, entropy_N

    @staticmethod
    def backward(
        ctx: Any, grad_log_probability_N: Tensor | None, grad_entropy_N: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden_ND, weight_VD, bias_V, target_N, entropy_N = ctx.saved_tensors
        if grad_log_probability_N is None:
            grad_log_probability_N = hidden_ND.new_zeros(hidden_ND.shape[0], dtype=_accumulator(hidden_ND))
        weight, bias = _in_type_of(hidden_ND, weight_VD, bias_V)
        sums = _Sums(hidden_ND, weight_VD, bias_V, ctx.needs_input_grad)
        for part, h_CD, chunk in _chunks(hidden_ND, weight, bias, target_N, ctx.form, slope=True):
            uncertain_CV = None
            if grad_entropy_N is not None and len(entropy_N):
                p_CV = chunk.p_CV / chunk.total_C
                uncertain_CV = torch.xlogy(p_CV, p_CV).addcmul_(p_CV, entropy_N[part, None])
                del p_CV
            grad_CV = chunk.minus_target().mul_(-grad_log_probability_N[part, None])
            if grad_entropy_N is not None and uncertain_CV is not None:
                grad_CV.addcmul_(uncertain_CV, grad_entropy_N[part, None], value=-1)
            sums.add(part, chunk.before_transform(grad_CV).to(h_CD.dtype), h_CD, weight)
            del chunk, grad_CV, uncertain_CV  # before the next chunk's products
        return (
            sums.hidden,
            sums.weight.to(weight_VD.dtype) if sums.weight is not None else None,
            sums.bias.to(bias_V.dtype) if sums.bias is not None else None,
            None,
            None,
            None,
        )


def _in_type_of(hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None) -> tuple[Tensor, Tensor | None]:
    return weight_VD.to(hidden_ND.dtype), bias_V.to(hidden_ND.dtype) if bias_V is not None else None


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


def _accumulator(hidden: Tensor) -> torch.dtype:
    return torch.float64 if hidden.dtype == torch.float64 else torch.float32
