"""Qwen3-Next and Qwen 3.5: gated attention and, in most blocks, linear attention by the gated delta rule.

Linear attention has groups of value heads, each with a key head that has queries and keys; a tensor process has whole
groups. It carries a state along the row, so it computes the documents of a packed row as the rows of a batch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from stoker.models.attention.apart import apart
from stoker.models.attention.linear_kernels import choose_by_device
from stoker.models.families.facts import Fused, Region
from stoker.models.families.llama import LLAMA, MLP
from stoker.models.families.qwen import NORMED, SHARED_EXPERT

PARTS = ("query", "key", "value")


def _sizes(config: Any) -> tuple[int, ...]:
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    return (keys, keys, config.linear_num_value_heads * config.linear_value_head_dim)


def attend(model: nn.Module) -> None:
    """Linear attention that computes each document of a packed row by itself."""
    for block in model.get_submodule(LLAMA.blocks).children():
        if hasattr(block, "linear_attn"):
            layer = block.get_submodule("linear_attn")
            choose_by_device(layer)
            apart(layer)


def _parts(layer: str) -> tuple[str, ...]:
    return tuple(f"linear_attn.{layer}.{part}" for part in PARTS)


DELTA_NET = Region(  # the projections of Qwen3-Next are in the order of the key heads
    enter="linear_attn",
    heads=True,
    head_counts=("linear_num_value_heads", "linear_num_key_heads"),
    column=(*_parts("conv1d"), "linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba"),
    keys_values=_parts("conv1d")[:2],
    row=("linear_attn.out_proj",),
    sums_at_end=True,  # within, documents are the rows of a batch
    shared=("linear_attn.norm",),
    counts=("linear_attn.num_v_heads", "linear_attn.value_dim"),
    key_counts=("linear_attn.num_k_heads", "linear_attn.key_dim"),
    per_head=("linear_attn.dt_bias", "linear_attn.A_log"),
)
SPLIT_DELTA_NET = replace(
    DELTA_NET,
    column=(
        *(*_parts("conv1d"), *_parts("in_proj_qkv")),
        *("linear_attn.in_proj_z", "linear_attn.in_proj_b", "linear_attn.in_proj_a"),
    ),
    keys_values=(*_parts("conv1d")[:2], *_parts("in_proj_qkv")[:2]),
)
CONVOLUTION = Fused("linear_attn.conv1d", PARTS, _sizes)

QWEN3_NEXT = replace(
    LLAMA,
    name="qwen3_next",
    regions=(NORMED, DELTA_NET, MLP, SHARED_EXPERT),
    fused=(CONVOLUTION,),
    attend=attend,
    by_document=("linear_attention",),
    refused={"context": "its linear attention carries a state along the row"},
)
QWEN3_5 = replace(
    QWEN3_NEXT,
    name="qwen3_5_text",
    regions=(NORMED, SPLIT_DELTA_NET, MLP),
    fused=(CONVOLUTION, Fused("linear_attn.in_proj_qkv", PARTS, _sizes)),
)
QWEN3_5_MOE = replace(QWEN3_5, name="qwen3_5_moe_text", regions=(NORMED, SPLIT_DELTA_NET, SHARED_EXPERT))
