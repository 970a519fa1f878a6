"""The auxiliary loss of mixtures of experts, which makes routers use all experts of a layer equally.

For each document and layer it is E * sum over the experts e of f_e P_e, with f_e the choices of e per token and P_e its
mean probability (Fedus et al., 2022, equations 4 to 6, over a document as in DeepSeek-V3, section 2.1.2). A document is
never split over micro-batches or replicas, so accumulation, packing and data parallelism do not change it; like the
loss itself it is weighted by the document's share of the step's targets: its tokens, or 1 in a mean over answers. It
enters the gradient and not the reported loss, which stays comparable with the held-out one.

Shapes: T tokens, E experts, U segments, D documents.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from stoker.hardware.process_device import on_device
from stoker.models.attention.collate import Inputs

BIASES = ("e_score_correction_bias", "expert_bias", "balancing_biases")  # names of routers' biases in transformers
# Routers that transformers 5.17 does not record, and the index of the logits in their output.
UNRECORDED = {"HunYuanMoEV1Gate": 0, "GraniteMoeTopKRouter": 2}
CHOSEN = ("num_experts_per_tok", "top_k_experts")  # names of the number of experts of a token
OF_SOFTMAX = "moe_statics."  # Ernie's bias is added to the softmax


@dataclass(frozen=True)
class RouterBalance:
    """The auxiliary loss of a model.

    Attributes:
        coefficient: factor of the mean over the layers.
        layers: routers of the whole model.
        chosen: experts of a token.
        copies: processes that route the same tokens and whose gradients are summed (tensor parallelism).
    """

    coefficient: float
    layers: int
    chosen: int
    copies: int = 1


def routers_of(model: nn.Module) -> dict[nn.Module, int]:
    """Returns the routers of a transformers model, and the index of the logits in their output."""
    # Some families name them in the class of the body only.
    recorded = (getattr(module, "_can_record_outputs", None) or {} for module in model.modules())
    recorders = next((outputs["router_logits"] for outputs in recorded if "router_logits" in outputs), ())
    recorders = recorders if isinstance(recorders, list | tuple) else [recorders]
    kinds = {r.target_class.__name__: r.index for r in recorders if hasattr(r, "target_class")}
    # transformers 5.17 names Llama 4's layer around the router.
    holders = tuple(r for r in recorders if isinstance(r, type))
    held = {m.get_submodule("router"): 1 for m in model.modules() if isinstance(m, holders) and hasattr(m, "router")}
    kinds = kinds or UNRECORDED
    found = held | {m: kinds[name] for m in model.modules() if (name := type(m).__name__) in kinds}
    # Gemma 4's router returns probabilities; its product returns the logits.
    return {m.get_submodule("proj") if hasattr(m, "proj") else m: place for m, place in found.items()}


def chooses_otherwise(model: PreTrainedModel) -> bool:
    """Returns whether routers choose other experts than those with the largest softmax: by other scores and a bias,
    which balances them instead of a loss (Wang et al., 2024, arXiv:2408.15664), or among groups of experts.
    """
    biased = any(name.endswith(BIASES) and OF_SOFTMAX not in name for name in model.state_dict())
    return biased or (getattr(model.config.get_text_config(), "n_group", None) or 1) > 1


def hook_routers(model: Any, coefficient: float) -> RouterBalance | None:
    """Makes the routers of a model report to `collect_router_logits`; None if it has none, or the coefficient is 0."""
    routers = routers_of(model) if coefficient else {}
    chosen = next((n for key in CHOSEN if (n := getattr(model.config.get_text_config(), key, None))), None)
    if isinstance(chosen, list):  # Hunyuan's has one entry per layer
        chosen = chosen[0] if len(set(chosen)) == 1 else None
    if not routers or not chosen:
        return None
    for router, place in routers.items():
        router.register_forward_hook(partial(_report, place))
    return RouterBalance(coefficient, len(routers), int(chosen))


@dataclass
class _Pass:
    """A forward pass: the documents of its tokens, and the routers' terms so far."""

    balance: RouterBalance
    inputs: Inputs
    units_T: Tensor
    counts_T: Tensor | None
    documents_DU: Tensor
    weights_D: Tensor
    terms: list[Tensor] = field(default_factory=list)

    def add(self, logits_TE: Tensor) -> None:
        """Adds the term of a layer."""
        logits_TE = logits_TE.to(torch.promote_types(logits_TE.dtype, torch.float32))
        p_TE = logits_TE.softmax(-1)
        chosen_TE = torch.zeros_like(p_TE).scatter_(1, p_TE.topk(self.balance.chosen, dim=-1).indices, 1.0)
        both = torch.cat((chosen_TE, p_TE, torch.ones_like(p_TE[:, :1])), dim=1)
        if self.counts_T is not None:
            both = both * self.counts_T[:, None].to(both.dtype)
        sums = both.new_zeros(self.documents_DU.shape[1], both.shape[1]).index_add(0, self.units_T, both)
        if self.inputs.across is not None:
            sums = self.inputs.across.total(sums)
        experts = p_TE.shape[1]
        chosen_DE, p_DE, tokens_D = (self.documents_DU.to(sums.dtype) @ sums).split((experts, experts, 1), dim=1)
        each_D = experts * (chosen_DE * p_DE).sum(1) / tokens_D.squeeze(1).square().clamp(min=1)
        self.terms.append((each_D * self.weights_D.to(each_D.dtype)).sum())

    def total(self) -> Tensor | None:
        """Returns the summed loss of this pass; None if no layer here has a router."""
        if not self.terms:
            return None
        return torch.stack(self.terms).sum() * (self.balance.coefficient / self.balance.layers / self.balance.copies)


# The active passes, the innermost last; a list for autograd's threads, as in `attention.packed_attention`.
_passes: list[_Pass | None] = [None]


@contextmanager
def collect_router_logits(balance: RouterBalance | None, inputs: Inputs) -> Iterator[_Pass | None]:
    """Collects the routers' logits within the block, where gradients are enabled and the pass' documents count."""
    counts = torch.is_grad_enabled() and inputs.balance != 0
    at_work = _begin(balance, inputs) if balance is not None and counts else None
    with _within(at_work):
        yield at_work


def current_pass() -> AbstractContextManager[None]:
    """Captures the current pass, and sets a copy of it where the context is entered: recompute calls the routers again,
    and terms in the pass itself would keep the recomputed activations until its end.
    """
    at_work = _passes[-1]
    return _within(replace(at_work, terms=[]) if at_work is not None else None)


def add_auxiliary_gradient(loss: Tensor, at_work: _Pass | None) -> Tensor:
    """Returns the loss of the pass, unchanged, with the gradient of its auxiliary loss added to its own."""
    total = at_work.total() if at_work is not None else None
    return loss if total is None else loss + (total - total.detach())


def with_auxiliary(hidden: Tensor, at_work: _Pass | None, scale: float | Tensor) -> Tensor:
    """Returns a pipeline stage's hidden states unchanged; their backward pass includes ``scale`` times the stage's
    auxiliary loss.
    """
    total = at_work.total() if at_work is not None else None
    return hidden if total is None else _WithAuxiliary.apply(hidden, total * scale)


class _WithAuxiliary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, total: Tensor) -> Tensor:
        ctx.save_for_backward(torch.ones_like(total))
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, ctx.saved_tensors[0]


@contextmanager
def _within(at_work: _Pass | None) -> Iterator[None]:
    _passes.append(at_work)
    try:
        yield
    finally:
        _passes.pop()


def _report(place: int, _: nn.Module, __: tuple[Any, ...], output: Any) -> None:
    if _passes[-1] is not None:
        logits = output[place] if isinstance(output, tuple) else output
        _passes[-1].add(logits.flatten(0, -2))


def _begin(balance: RouterBalance, inputs: Inputs) -> _Pass:
    device = inputs.ids.device
    weights_D = inputs.sum_by_document(torch.ones_like(inputs.documents, dtype=torch.float32))
    if inputs.balance is not None:
        weights_D = torch.full_like(weights_D, inputs.balance)
    if inputs.segments is None:
        rows, length = inputs.ids.shape
        units_T = torch.arange(rows, device=device).repeat_interleave(length)
        counts_T = inputs.mask.flatten() if inputs.mask is not None else None
        return _Pass(balance, inputs, units_T, counts_T, torch.eye(rows, device=device), weights_D)
    lengths = torch.tensor([segment.length for segment in inputs.segments])
    units_T = on_device(torch.arange(len(lengths)).repeat_interleave(lengths), device)
    documents_DU = torch.zeros(inputs.rows, len(lengths))
    for document, members in enumerate(inputs.members):
        documents_DU[document, list(members)] = 1.0
    units_T = units_T if inputs.own is None else units_T[inputs.own]
    return _Pass(balance, inputs, units_T, None, on_device(documents_DU, device), weights_D)
