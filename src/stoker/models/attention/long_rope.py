"""LongRoPE (Ding et al., 2024, arXiv:2402.13753) by the length of each document.

transformers chooses between the factors of short and of long texts by the highest position in a batch, so that a
document's hidden states depend on the others. Shapes: B rows, L length, K rotated size of a head.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

TYPE = "longrope"


def has_long_rope(config: PreTrainedConfig) -> bool:
    """Returns whether a model has LongRoPE."""
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    return rope.get("rope_type") == TYPE


def choose_by_document(model: nn.Module) -> None:
    """Makes the rotary embeddings of a model with LongRoPE choose their factors for each document.

    A document is what begins at position 0, so packed rows must not share beginnings.
    """
    for module in model.modules():
        if getattr(module, "rope_type", None) == TYPE:
            module.forward = partial(_forward, module)


@torch.no_grad()
def _forward(module: Any, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Returns cosines and sines, each of shape (B, L, K), for position_ids of shape (B, L)."""
    rope = module.config.rope_parameters
    original = rope["original_max_position_embeddings"]
    is_long_BL1 = (document_lengths(position_ids) > original)[..., None]
    short_K = module.original_inv_freq.float().to(x.device)
    inverse_BLK, scale = short_K, module.attention_scaling
    if "long_mscale" in rope:  # Phi-3.5 MoE: transformers changes the scale alone
        scale = rope["short_mscale"] + is_long_BL1.to(short_K.dtype) * (rope["long_mscale"] - rope["short_mscale"])
    else:
        long_K, _ = ROPE_INIT_FUNCTIONS[TYPE](module.config, x.device, seq_len=original + 1)
        inverse_BLK = torch.where(is_long_BL1, long_K, short_K)
    angles_BLK = position_ids[..., None].float() * inverse_BLK
    both_BLK = torch.cat([angles_BLK, angles_BLK], -1)
    return (both_BLK.cos() * scale).to(x.dtype), (both_BLK.sin() * scale).to(x.dtype)


def document_lengths(position_ids: Tensor) -> Tensor:
    """Returns the length of each token's document, shape (B, L), in rows of documents whose positions begin at 0."""
    document_BL = (position_ids == 0).cumsum(1)
    empty = position_ids.new_zeros(position_ids.shape[0], position_ids.shape[1] + 1)
    return empty.scatter_reduce(1, document_BL, position_ids + 1, "amax").gather(1, document_BL)
