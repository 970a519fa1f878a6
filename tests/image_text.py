"""Tiny image-text models with random weights, by the name that transformers knows the family by."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel

from families import DELTA_NET, EXPERTS, LLAMA_LIKE, WINDOW
from tiny_llama import save_tokenizer
from tiny_tokenizer import tiny_tokenizer

VOCABULARY = 512
TEXT: dict[str, Any] = {**LLAMA_LIKE, "head_dim": 8, "vocab_size": VOCABULARY, "max_position_embeddings": 128}
LINEAR: dict[str, Any] = {**TEXT, **DELTA_NET, "vocab_size": VOCABULARY, "max_position_embeddings": 128}
WINDOWS = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
IMAGE: dict[str, Any] = {
    **{"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2},
    **{"image_size": 28, "patch_size": 14},
}
QWEN_IMAGE: dict[str, Any] = {
    **{"depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32},
    **{"patch_size": 14, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
}
SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
CLIP = {**IMAGE, "model_type": "clip_vision_model", "projection_dim": 16}
SIGLIP = {**IMAGE, "model_type": "siglip_vision_model"}
PIXTRAL = {**IMAGE, "model_type": "pixtral", "head_dim": 8}
LLAMA4_IMAGE = {**IMAGE, "projector_input_dim": 16, "projector_output_dim": 16, "vision_output_dim": 16}
GLM_IMAGE = {**QWEN_IMAGE, "image_size": 28}
EDGES = {"image_size": [28, 28], "patch_size": [14, 14]}


def _of(text: dict[str, Any], vision: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {"text_config": text, "vision_config": vision, **changes}


SHAPES: dict[str, dict[str, Any]] = {
    "gemma3": _of({**TEXT, "query_pre_attn_scalar": 8, **WINDOWS}, SIGLIP, mm_tokens_per_image=4),
    "gemma4": _of(
        {
            **TEXT,
            **WINDOWS,
            "global_head_dim": 8,
            "vocab_size_per_layer_input": VOCABULARY,
            "hidden_size_per_layer_input": 4,
            "num_kv_shared_layers": 0,
        },
        {**IMAGE, "num_key_value_heads": 2, "head_dim": 8},
        audio_config=None,
    ),
    "qwen2_vl": _of(
        {**TEXT, "rope_parameters": SECTIONS}, {"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2}
    ),
    "qwen2_5_vl": _of({**TEXT, "rope_parameters": SECTIONS}, {**QWEN_IMAGE, "fullatt_block_indexes": [0]}),
    "qwen3_vl": _of({**TEXT, "rope_parameters": {**SECTIONS, "mrope_interleaved": True}}, QWEN_IMAGE),
    "qwen3_vl_moe": _of({**TEXT, **EXPERTS, "rope_parameters": {**SECTIONS, "mrope_interleaved": True}}, QWEN_IMAGE),
    "qwen3_5": _of(LINEAR, QWEN_IMAGE),
    "qwen3_5_moe": _of({**LINEAR, **EXPERTS, "shared_expert_intermediate_size": 16}, QWEN_IMAGE),
    "mistral3": _of({**TEXT, "model_type": "mistral", "sliding_window": None}, PIXTRAL),
    "llama4": _of(
        {
            **TEXT,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "intermediate_size_mlp": 48,
            "interleave_moe_layer_step": 1,
            "attention_chunk_size": 16,
        },
        LLAMA4_IMAGE,
    ),
    "glm4v": _of(
        {**TEXT, "rope_parameters": {**SECTIONS, "mrope_section": [1, 1, 0], "partial_rotary_factor": 0.5}}, GLM_IMAGE
    ),
    "internvl": _of({**TEXT, "model_type": "qwen3"}, {**IMAGE, **EDGES}),
    "llava": _of({**TEXT, "model_type": "llama"}, CLIP),
    "llava_next": _of({**TEXT, "model_type": "mistral"}, CLIP, image_grid_pinpoints=[[28, 28]]),
    "llava_onevision": _of({**TEXT, "model_type": "qwen2"}, SIGLIP, image_grid_pinpoints=[[28, 28]]),
    "idefics3": _of({**TEXT, "model_type": "llama"}, IMAGE),
    "smolvlm": _of({**TEXT, "model_type": "llama"}, IMAGE),
}
IMAGE_TOKENS = {"image_token_id": 500, "image_token_index": 500, "boi_token_index": 501, "eoi_token_index": 502}


def tiny_image_text(
    family: str, *, tied: bool = False, dtype: torch.dtype = torch.float64, vocabulary: int = VOCABULARY
) -> PreTrainedModel:
    """An image-text model, whose norms and biases have random values too; every expert is computed in float64."""
    config = AutoConfig.for_model(family, **SHAPES[family])
    config.get_text_config().vocab_size = vocabulary
    for name, token in IMAGE_TOKENS.items():
        if hasattr(config, name):
            setattr(config, name, token)
    config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = tied
    config.get_text_config().pad_token_id = 3 if family == "gemma4" else None
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForImageTextToText.from_config(
        config, dtype=dtype, experts_implementation="eager"
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return model.eval()


def save_image_text(
    folder: Path, family: str, *, tied: bool = False, vocabulary: int = VOCABULARY, **how: Any
) -> PreTrainedModel:
    """Writes an image-text model in float32 and the tiny tokenizer, as ``save_pretrained`` leaves them; gives it.

    Args:
        **how: arguments of ``save_pretrained``.
    """
    model = tiny_image_text(family, tied=tied, dtype=torch.float32, vocabulary=vocabulary)
    model.save_pretrained(folder, **how)
    save_tokenizer(folder, tiny_tokenizer())
    return model
