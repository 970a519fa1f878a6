"""A head with one score instead of the logits of the vocabulary, for reward models.

Shapes: N scored positions, D width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from stoker.models.chunked_head import VocabularySplit
from stoker.models.head import Head, LogitsHead
from stoker.models.init_weights import drawn_for
from stoker.models.meta_model import META
from stoker.models.tuning.virtual_tokens import Drawn

SCORE_OFFSET = "score_offset"  # key of an exported reward model's config.json: its offset
OFFSET = "offset"  # buffer of the head, subtracted from its scores, so that demonstrations score 0


def add_score_head(model: PreTrainedModel, *, dtype: torch.dtype) -> nn.Linear:
    """Replaces the output embedding of a causal language model by a linear layer with one output, on meta."""
    width = model.get_output_embeddings().weight.shape[1]
    head = nn.Linear(int(width), 1, bias=False, device=META, dtype=dtype)
    offset = float(getattr(model.config, SCORE_OFFSET, 0.0))
    head.register_buffer(OFFSET, torch.tensor(offset, dtype=dtype))
    head.register_forward_pre_hook(_in_type_of_weights)  # a frozen base in 16 bits has hidden states in 16 bits
    model.set_output_embeddings(head)
    for config in {id(c): c for c in (model.config, model.config.get_text_config())}.values():
        config.tie_word_embeddings = False
    return head


def _in_type_of_weights(head: nn.Module, arguments: tuple[Tensor]) -> tuple[Tensor]:
    return (arguments[0].to(next(head.parameters()).dtype),)


def first_scores(model: nn.Module, head: nn.Linear, seed: int, stored: Callable[[], Tensor] | None = None) -> Drawn:
    """Returns the head's initial weights by name: normal, deviation 1/sqrt(D + 1) (Huang et al., 2024, "The N+
    Details", 11).

    Args:
        stored: reads the head of a base that is a reward model already, which takes the place of drawn weights.
    """
    names = [f"{name}.weight" for name, module in model.named_modules() if module is head]
    return dict.fromkeys(names, stored or partial(draw_weights, head.in_features, seed, "score"))


def draw_weights(width: int, seed: int, purpose: str) -> Tensor:
    """Draws the weights of a score head: normal, deviation 1/sqrt(width + 1), by a generator of its own."""
    with drawn_for(seed, purpose):
        return torch.randn(1, width) / (width + 1) ** 0.5


def scores(hidden_ND: Tensor, head: Head | LogitsHead) -> Tensor:
    """Returns the score at each position, before the offset, shape (N,), on every tensor process."""
    return hidden_ND[:, 0] if isinstance(head, LogitsHead) else one_output(hidden_ND, head.linear, head.across)


def one_output(hidden_ND: Tensor, layer: nn.Linear, across: VocabularySplit | None) -> Tensor:
    """Returns the only output of a linear layer that every process has, in float32 at least, shape (N,).

    The gradient of the hidden states is summed over the processes that share the vocabulary, so one of them computes
    the output.
    """
    kept = torch.promote_types(hidden_ND.dtype, torch.float32)  # gathered weights may be in 16 bits
    bias = None if layer.bias is None else layer.bias.to(kept)
    with torch.autocast(hidden_ND.device.type, enabled=False):  # answers are compared by small differences
        out_N = linear(hidden_ND.to(kept), layer.weight.to(kept), bias).squeeze(-1)
    if across is None:
        return out_N
    return across.add(out_N if across.start == 0 else out_N * 0)


def score_head_of(model: Any) -> nn.Linear | None:
    """Returns the head of a model or of a stage, without its adapter; None if another stage has it."""
    head = model.get_output_embeddings()
    if isinstance(head, BaseTunerLayer):
        head = head.get_base_layer()
    return head if isinstance(head, nn.Linear) else None
