"""The autograd functions of a language-model head.

Shapes: N predicted positions, C positions of a chunk, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from stoker.hardware.process_device import is_nvidia
from stoker.models.chunked_head import LogitForm, score_slopes, scored
from stoker.models.compiled_scores import accumulator


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
        loss = torch.zeros((), dtype=accumulator(hidden_ND), device=hidden_ND.device)
        correct = torch.zeros((), dtype=torch.int64, device=hidden_ND.device)
        sums = _Sums(hidden_ND, weight_VD, bias_V, wanted)
        how = {"entropy": False, "slope": any(wanted), "summed": True}
        for part, chunk in scored(hidden_ND, weight, bias, target_N, form, **how):
            loss -= chunk.log_p_C.sum()
            correct += chunk.right_C.sum()
            if chunk.slope_CV is not None:
                sums.add(part, chunk.slope_CV, hidden_ND[part], weight)
            del chunk  # before the next one's products
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
    """Log-probabilities of targets and entropies.

    With p the probabilities and H the entropy: d log p_t / d logit = onehot - p, and d H / d logit = -p (log p + H).
    The gradient of a hidden state is that of its log-probability times a number. So under a frozen head it is computed
    together with the log-probability, but for this number. The gradient of a trained head sums over positions whose
    numbers the backward pass knows, so that pass computes the logits of each chunk again, as it does for entropies.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        target_N: Tensor,
        form: LogitForm,
        entropy: bool,
        entropy_gradient: bool,
        grad_enabled: bool,  # always off inside a Function, and needs_input_grad ignores it
    ) -> tuple[Tensor, Tensor]:
        trained = any(ctx.needs_input_grad[1:3])
        ctx.at_once = grad_enabled and ctx.needs_input_grad[0] and not trained and not entropy_gradient
        weight, bias = _in_type_of(hidden_ND, weight_VD, bias_V)
        log_probability_N = hidden_ND.new_zeros(hidden_ND.shape[0], dtype=accumulator(hidden_ND))
        entropy_N = torch.zeros_like(log_probability_N) if entropy else log_probability_N.new_zeros(0)
        sums = _Sums(hidden_ND, weight_VD, bias_V, (ctx.at_once, False, False))
        how = {"entropy": entropy, "slope": ctx.at_once, "summed": False}
        for part, chunk in scored(hidden_ND, weight, bias, target_N, form, **how):
            log_probability_N[part] = chunk.log_p_C
            if chunk.entropy_C is not None:
                entropy_N[part] = chunk.entropy_C
            if chunk.slope_CV is not None:
                sums.add(part, chunk.slope_CV, hidden_ND[part], weight)
            del chunk  # before the next one's products
        if ctx.at_once:
            ctx.save_for_backward(sums.hidden)
        else:
            ctx.save_for_backward(hidden_ND, weight_VD, bias_V, target_N, entropy_N)
        ctx.form = form
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy_N)
        ctx.set_materialize_grads(False)
        return log_probability_N, entropy_N

    @staticmethod
    def backward(
        ctx: Any, grad_log_probability_N: Tensor | None, grad_entropy_N: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        if ctx.at_once:
            (minus_ND,) = ctx.saved_tensors
            if grad_log_probability_N is None:
                return (None,) * 8
            # In the type of the result, without a wider copy.
            return torch.mul(minus_ND, -grad_log_probability_N[:, None], out=torch.empty_like(minus_ND)), *(None,) * 7
        hidden_ND, weight_VD, bias_V, target_N, entropy_N = ctx.saved_tensors
        if grad_log_probability_N is None:
            grad_log_probability_N = hidden_ND.new_zeros(hidden_ND.shape[0], dtype=accumulator(hidden_ND))
        weight, bias = _in_type_of(hidden_ND, weight_VD, bias_V)
        sums = _Sums(hidden_ND, weight_VD, bias_V, ctx.needs_input_grad)
        entropies = None if grad_entropy_N is None else (entropy_N, grad_entropy_N)
        slopes = score_slopes(hidden_ND, weight, bias, target_N, ctx.form, grad_log_probability_N, entropies)
        for part, grad_CV in slopes:
            sums.add(part, grad_CV, hidden_ND[part], weight)
            del grad_CV  # before the next chunk's products
        return (
            sums.hidden,
            sums.weight.to(weight_VD.dtype) if sums.weight is not None else None,
            sums.bias.to(bias_V.dtype) if sums.bias is not None else None,
            *(None,) * 5,
        )


class _Sums:
    """The gradients of hidden states, weight and bias, accumulated over chunks; None for those not needed."""

    def __init__(self, hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, wanted: Sequence[bool]) -> None:
        wide = accumulator(hidden_ND)
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


def _in_type_of(hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None) -> tuple[Tensor, Tensor | None]:
    return weight_VD.to(hidden_ND.dtype), bias_V.to(hidden_ND.dtype) if bias_V is not None else None
