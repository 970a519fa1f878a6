"""Llama 4 (text): attention within chunks, layers without rotary positions, and experts whose inputs are scaled.

Positions, chunks and the scale of queries count from the beginning of a document, not of a packed row. A token is
computed by its own experts only; transformers' code computes every token with every expert.

Shapes: B rows, T tokens, D width, H heads, K head size or experts of a token, E experts, S pairs of token and expert.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from stoker.models.attention.attention_patch import interface_of
from stoker.models.families.facts import Region
from stoker.models.families.llama import ATTENTION, LLAMA

CHUNKED = "chunked_attention"


def attend(model: nn.Module) -> None:
    """Attention by the positions in documents, and experts that get their own tokens only."""
    vars(model)["base_model_prefix"] = "model"  # the class has the name of its place beside a vision model
    for kind, block in zip(model.config.layer_types, model.get_submodule(LLAMA.blocks).children(), strict=True):  # type: ignore[union-attr, arg-type]
        attention: Any = block.self_attn
        block.register_forward_pre_hook(_in_chunks if kind == CHUNKED else _with_positions, with_kwargs=True)
        if attention.attn_temperature_tuning and not attention.use_rope:
            attention.forward = partial(_forward, attention)
        if block.is_moe_layer:
            moe: Any = block.feed_forward
            moe.forward = partial(_mixture, moe)
            moe.experts.forward = partial(_experts, moe.experts)


def _in_chunks(block: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Hook: the block hands the size of its chunks on to the attention function."""
    return args, {**kwargs, "chunk": block.self_attn.config.attention_chunk_size}


def _with_positions(_: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Hook: the block hands the positions on to its attention."""
    return args, {**kwargs, "positions_BT": kwargs["position_ids"]}


def _forward(  # the arguments are those of Llama4TextAttention
    attention: Any,
    hidden_states: Tensor,
    position_embeddings: Tensor,
    attention_mask: Tensor | None,
    past_key_values: Any = None,
    *,
    positions_BT: Tensor,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention without rotary positions. Its queries are scaled by their positions, shape (B, T, D).

    The model's own code counts the scale's positions along the row.
    """
    from transformers.models.llama4.modeling_llama4 import eager_attention_forward

    projections = attention.q_proj, attention.k_proj, attention.v_proj
    query, key, value = (p(hidden_states).unflatten(-1, (-1, attention.head_dim)) for p in projections)
    steps_BT = torch.floor((positions_BT.float() + 1.0) / attention.floor_scale)
    scale_BT = torch.log1p(steps_BT) * attention.attn_scale + 1.0
    query = (query * scale_BT[..., None, None]).to(query.dtype)
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    if past_key_values is not None:
        key, value = past_key_values.update(key, value, attention.layer_idx)
    out_BTHK, weights = (interface_of(attention.config) or eager_attention_forward)(
        *(attention, query, key, value, attention_mask),
        dropout=attention.attention_dropout if attention.training else 0.0,
        scaling=attention.scaling,
        **options,
    )
    return attention.o_proj(out_BTHK.flatten(2)), weights


def _mixture(moe: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the sum of the shared expert and of each token's experts, shape (B, T, D), and the router's logits."""
    x_TD = hidden_states.flatten(0, -2)
    _, logits_TE = moe.router(x_TD)
    top_TK, expert_TK = logits_TE.topk(moe.top_k, dim=-1)
    score_TK = top_TK.float().sigmoid().to(x_TD.dtype)
    x_SD = (x_TD[:, None] * score_TK[..., None]).flatten(0, 1)  # scores scale what goes into experts
    expert_S1 = expert_TK.flatten()[:, None]
    routed_SD = moe.experts(x_SD, expert_S1, torch.ones_like(expert_S1, dtype=x_SD.dtype))
    routed_TD = routed_SD.unflatten(0, expert_TK.shape).sum(dim=1)
    return moe.shared_expert(hidden_states) + routed_TD.view(hidden_states.shape), logits_TE


def _experts(experts: Any, x_SD: Tensor, expert_S1: Tensor, weight_S1: Tensor) -> Tensor:
    """Returns the output of each row's expert times a weight, shape (S, D)."""
    from stoker.models.grouped_experts import grouped_product  # takes a second, and all families import this file

    expert_S, order_S = expert_S1[:, 0].sort(stable=True)
    numbers_E = torch.arange(experts.num_experts, device=x_SD.device)
    ends_E = torch.searchsorted(expert_S, numbers_E, right=True).to(torch.int32)
    gate, up = grouped_product(x_SD[order_S], experts.gate_up_proj, ends_E).chunk(2, dim=-1)
    sorted_SD = grouped_product(experts.act_fn(gate) * up, experts.down_proj, ends_E)
    return (sorted_SD[order_S.argsort()] * weight_S1).to(x_SD.dtype)


LLAMA4 = replace(
    LLAMA,
    name="llama4_text",
    regions=(
        ATTENTION,
        Region(
            enter="feed_forward",
            column=("feed_forward.gate_proj", "feed_forward.up_proj"),
            row=("feed_forward.down_proj",),
        ),
        Region(
            enter="feed_forward",
            column=("feed_forward.shared_expert.gate_proj", "feed_forward.shared_expert.up_proj"),
            row=("feed_forward.shared_expert.down_proj",),
            experts="feed_forward.experts",
            shared=("feed_forward.router",),
        ),
    ),
    attend=attend,
    by_document=(CHUNKED,),
)
