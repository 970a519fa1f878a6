"""The language-model head and its cross entropy, in chunks, so that full logits never exist.

Shapes: N predicted positions, C positions of a chunk, D width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

CHUNK_BYTES = 64 << 20  # of float32 logits at a time: large enough for an efficient matrix product


class Across(Protocol):
    """Processes that each have the rows of some words of the output embedding.

    Attributes:
        start: the first word of this process.
        widest: words of the process that has most, so that all cut the same chunks.
    """

    start: int
    widest: int

    def maximum(self, x_C: Tensor) -> None:
        """The largest over the processes, in place."""

    def total(self, x: Tensor) -> None:
        """The sum over the processes, in place."""


@dataclass(frozen=True)
class Head:
    """How hidden states become logits: ``softcap * tanh(scale * (h W^T + b) / softcap)``.

    Attributes:
        linear: the output embedding.
        scale: factor of the logits (Cohere, Granite); 1 for most.
        softcap: bound of the logits (Gemma 2); None for most.
        across: the processes that the vocabulary is split over; None where ``linear`` is whole. The gradient of the
            hidden states then covers this process' words only, and is to be summed.
    """

    linear: nn.Linear
    scale: float = 1.0
    softcap: float | None = None
    across: Across | None = None

    def logits(self, hidden_ND: Tensor) -> Tensor:
        """All logits of a few positions, shape (N, V)."""
        return _transform(self.linear(hidden_ND) * self.scale, self.softcap)

    def likeliest(self, hidden_ND: Tensor) -> Tensor:
        """The most likely token of each of a few positions, shape (N,)."""
        top_N, best_N = self.logits(hidden_ND).max(dim=-1)
        if self.across is None:
            return best_N
        highest_N = top_N.clone()
        self.across.maximum(highest_N)
        chosen_N = torch.where(top_N == highest_N, best_N + self.across.start, -1)
        self.across.maximum(chosen_N)
        return chosen_N

    def loss(self, hidden_ND: Tensor, target_N: Tensor) -> tuple[Tensor, Tensor]:
        """The summed cross entropy and how many targets were the most likely token.

        Returns:
            (sum of the losses, float32 scalar with gradient; count of correct predictions, int64 scalar).
        """
        return _ChunkedCrossEntropy.apply(
            hidden_ND,
            self.linear.weight,
            self.linear.bias,
            target_N,
            self.scale,
            self.softcap,
            self.across,
            torch.is_grad_enabled(),
        )


def head_of(model: nn.Module) -> Head | None:
    """The head of a causal language model, or None where it is more than a plain linear layer."""
    linear = model.get_output_embeddings()  # type: ignore[operator]
    if type(linear) is not nn.Linear:
        return None
    config: Any = model.config
    scale = getattr(config, "logit_scale", None) or 1.0 / (getattr(config, "logits_scaling", None) or 1.0)
    return Head(linear, float(scale), getattr(config, "final_logit_softcapping", None))


def _transform(logits: Tensor, softcap: float | None) -> Tensor:
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Computes the gradient of the hidden states (and of a trained head) together with the loss.

    The gradient of a cross entropy with respect to its logits is softmax - onehot; it needs only the chunk's
    own logits, so each chunk is finished before the next begins, and the backward pass computes
    nothing again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        target_N: Tensor,
        scale: float,
        softcap: float | None,
        across: Across | None,
        grad_enabled: bool,  # inside of a Function it never is, and needs_input_grad does not look
    ) -> tuple[Tensor, Tensor]:
        wants_hidden, wants_weight, wants_bias = (grad_enabled and wanted for wanted in ctx.needs_input_grad[:3])
        wants_any = wants_hidden or wants_weight or wants_bias
        weight = weight_VD.to(hidden_ND.dtype)
        bias = bias_V.to(hidden_ND.dtype) if bias_V is not None else None
        words = weight.shape[0] if across is None else across.widest
        rows = max(1, CHUNK_BYTES // (4 * words))
        loss = torch.zeros((), dtype=_accumulator(hidden_ND), device=hidden_ND.device)
        correct = torch.zeros((), dtype=torch.int64, device=hidden_ND.device)
        grad_hidden = torch.empty_like(hidden_ND) if wants_hidden else None
        grad_weight = torch.zeros_like(weight_VD, dtype=loss.dtype) if wants_weight else None
        grad_bias = torch.zeros_like(bias_V, dtype=loss.dtype) if wants_bias and bias_V is not None else None
        for start in range(0, hidden_ND.shape[0], rows):
            h_CD, t_C = hidden_ND[start : start + rows], target_N[start : start + rows, None]
            raw_CV = nn.functional.linear(h_CD, weight, bias).to(loss.dtype)
            if scale != 1.0:
                raw_CV.mul_(scale)
            logits_CV = _transform(raw_CV, softcap)
            top_C, best_C = logits_CV.max(dim=1, keepdim=True)
            t_C, own_C = _here(t_C, across, weight.shape[0])
            if across is not None:
                across.maximum(top_C)
            picked_C = logits_CV.gather(1, t_C)
            picked_C = picked_C if own_C is None else picked_C.where(own_C, 0.0)
            slope_CV = 1 - (logits_CV / softcap) ** 2 if softcap is not None and wants_any else None
            p_CV = logits_CV.sub_(top_C).exp_() if softcap is None else (logits_CV - top_C).exp_()
            total_C = p_CV.sum(dim=1, keepdim=True)
            right_C = best_C == t_C
            if across is not None:
                total_C, picked_C = _summed(across, total_C, picked_C)
                right_C = picked_C >= top_C
            correct += right_C.sum()
            loss += (total_C.log() + top_C - picked_C).sum()
            if not wants_any:
                continue
            hit_C = torch.full_like(total_C, -1.0) if own_C is None else -own_C.to(total_C.dtype)
            p_CV.div_(total_C).scatter_add_(1, t_C, hit_C)
            if slope_CV is not None:
                p_CV.mul_(slope_CV)
            if scale != 1.0:
                p_CV.mul_(scale)
            grad_CV = p_CV.to(hidden_ND.dtype)
            if grad_hidden is not None:
                torch.mm(grad_CV, weight, out=grad_hidden[start : start + rows])
            if grad_weight is not None:
                grad_weight.addmm_(grad_CV.T.to(loss.dtype), h_CD.to(loss.dtype))
            if grad_bias is not None:
                grad_bias += grad_CV.sum(dim=0)
        ctx.grads = (grad_hidden, grad_weight, grad_bias)
        ctx.dtypes = (weight_VD.dtype, bias_V.dtype if bias_V is not None else None)
        ctx.mark_non_differentiable(correct)
        return loss, correct

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        # Kept as they are: a zero-bubble schedule comes twice, for the hidden states and then for the weights.
        hidden, weight, bias = ctx.grads
        return (
            hidden * grad_loss if hidden is not None else None,
            (weight * grad_loss).to(ctx.dtypes[0]) if weight is not None else None,
            (bias * grad_loss).to(ctx.dtypes[1]) if bias is not None else None,
            None,
            None,
            None,
            None,
            None,
        )


def _here(t_C: Tensor, across: Across | None, words: int) -> tuple[Tensor, Tensor | None]:
    """Targets counted from this process' first word, and which of them it has; others are 0."""
    if across is None:
        return t_C, None
    own_C = (t_C >= across.start) & (t_C < across.start + words)
    return torch.where(own_C, t_C - across.start, 0), own_C


def _summed(across: Across, *values_C: Tensor) -> tuple[Tensor, ...]:
    stacked = torch.stack(values_C)
    across.total(stacked)
    return stacked.unbind()


def _accumulator(hidden: Tensor) -> torch.dtype:
    return torch.float64 if hidden.dtype == torch.float64 else torch.float32
