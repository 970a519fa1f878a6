"""Tiny random models of the real architectures, by the name that transformers knows the family by."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCABULARY = 128
# A small Gemma 4: embeddings for every block, and last blocks that use keys and values of earlier ones.
SMALL_GEMMA4: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "attention_k_eq_v": False,
    "hidden_size_per_layer_input": 6,
    "vocab_size_per_layer_input": VOCABULARY,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "enable_moe_block": False,
}
LLAMA_LIKE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}
NO_SHARED_KEYS = {key: value for key, value in LLAMA_LIKE.items() if key != "num_key_value_heads"}
WINDOW = 6  # shorter than the documents of the tests
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
ROUTED: dict[str, Any] = {  # experts among which a bias of each helps to choose, after a dense block
    **LLAMA_LIKE,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_shared_experts": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
LATENT: dict[str, Any] = {  # attention through latent vectors
    **ROUTED,
    "num_key_value_heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6,
    "v_head_dim": 8,
}
INDEXED: dict[str, Any] = {  # few keys of a document; with few heads an indexer often gives two keys the score 0
    "index_n_heads": 16,
    "index_head_dim": 8,
    "index_topk": 7,
}
DELTA_NET: dict[str, Any] = {  # linear and full attention in turn
    **LLAMA_LIKE,
    "head_dim": 8,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 6,
    "layer_types": ["linear_attention", "full_attention"],
}
SHAPES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4},
    "opt": {
        **NO_SHARED_KEYS,
        "ffn_dim": 48,
        "word_embed_proj_dim": 16,  # the head takes another width than the blocks
        "do_layer_norm_before": True,
    },
    "gpt_neo": {
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 4,
        "attention_types": [[["global", "local"], 1]],
        "window_size": WINDOW,
        "max_position_embeddings": 64,
    },
    "gptj": {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4, "n_positions": 64},
    "gpt_neox": NO_SHARED_KEYS,
    "falcon": NO_SHARED_KEYS,
    "llama": LLAMA_LIKE,
    "qwen2": LLAMA_LIKE,
    "qwen3": {**LLAMA_LIKE, "head_dim": 8},
    "mistral": {**LLAMA_LIKE, "sliding_window": WINDOW},
    "gemma": {**LLAMA_LIKE, "head_dim": 8},
    "gemma2": {
        **LLAMA_LIKE,
        "head_dim": 8,
        "query_pre_attn_scalar": 8,
        "sliding_window": WINDOW,
        "attn_logit_softcapping": 2.0,  # low enough to be felt by a tiny model
        "final_logit_softcapping": 3.0,
    },
    "gemma3_text": {**LLAMA_LIKE, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": WINDOW},
    "glm": {**LLAMA_LIKE, "head_dim": 8},
    "glm4": {**LLAMA_LIKE, "head_dim": 8},
    "phi": LLAMA_LIKE,
    "phi3": LLAMA_LIKE,
    "cohere": {**LLAMA_LIKE, "logit_scale": 0.25},
    "granite": {**LLAMA_LIKE, "logits_scaling": 4.0},
    "smollm3": {**LLAMA_LIKE, "no_rope_layer_interval": 2},
    "seed_oss": {**LLAMA_LIKE, "head_dim": 8},
    "ernie4_5": {**LLAMA_LIKE, "head_dim": 8, "use_bias": True},
    "cwm": {**LLAMA_LIKE, "head_dim": 8, "sliding_window": WINDOW},
    "ministral": {**LLAMA_LIKE, "head_dim": 8, "sliding_window": WINDOW},
    "ministral3": {**LLAMA_LIKE, "head_dim": 8},
    "cohere2": {**LLAMA_LIKE, "logit_scale": 0.25, "sliding_window": WINDOW},
    "olmo": {**LLAMA_LIKE, "clip_qkv": 1.0},
    "olmo2": LLAMA_LIKE,
    "olmo3": {**LLAMA_LIKE, "sliding_window": WINDOW},
    "stablelm": {**LLAMA_LIKE, "use_qkv_bias": True},
    "exaone4": {**LLAMA_LIKE, "head_dim": 8, "sliding_window": WINDOW},
    "hunyuan_v1_dense": {**LLAMA_LIKE, "head_dim": 8},
    "arcee": LLAMA_LIKE,
    "nemotron": LLAMA_LIKE,
    "starcoder2": LLAMA_LIKE,
    "apertus": LLAMA_LIKE,
    "nanochat": {**LLAMA_LIKE, "final_logit_softcapping": 3.0},
    "mixtral": {**LLAMA_LIKE, "num_local_experts": 4},
    "qwen2_moe": {**LLAMA_LIKE, **EXPERTS, "shared_expert_intermediate_size": 16},
    "qwen3_moe": {**LLAMA_LIKE, **EXPERTS, "head_dim": 8},
    "gpt_oss": {
        **LLAMA_LIKE,
        "head_dim": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": WINDOW,
    },
    "glm4_moe": {**ROUTED, "head_dim": 8, "use_qk_norm": True, "attention_bias": True},
    "dots1": {**ROUTED, "head_dim": 8, "sliding_window": WINDOW},
    "deepseek_v3": LATENT,
    "deepseek_v2": {**LATENT, "q_lora_rank": None, "topk_method": "group_limited_greedy"},
    "glm4_moe_lite": {**LATENT, "qk_nope_head_dim": 4, "mlp_layer_types": ["dense", "sparse"]},
    "olmoe": {**LLAMA_LIKE, **EXPERTS},
    "granitemoe": {**LLAMA_LIKE, "num_local_experts": 4, "logits_scaling": 4.0},
    "ernie4_5_moe": {
        **LLAMA_LIKE,
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_intermediate_size": 16,
        "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": -1,
    },
    "minimax_m2": {**LLAMA_LIKE, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    "hunyuan_v1_moe": {**LLAMA_LIKE, "head_dim": 8, "num_experts": 4, "moe_topk": 2},
    "phimoe": {
        **LLAMA_LIKE,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "lm_head_bias": True,
        "attention_bias": True,
        "router_jitter_noise": 0.0,  # without it experts are not drawn at random
    },
    "qwen3_next": {**DELTA_NET, **EXPERTS, "shared_expert_intermediate_size": 16},
    "qwen3_5_text": DELTA_NET,
    "qwen3_5_moe_text": {**DELTA_NET, **EXPERTS, "shared_expert_intermediate_size": 16},
    "llama4_text": {
        **LLAMA_LIKE,
        "head_dim": 8,
        "intermediate_size": 16,
        "intermediate_size_mlp": 48,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "moe_layers": [1],
        "no_rope_layers": [1, 0],
        "attention_chunk_size": WINDOW,
        "floor_scale": WINDOW,
        "attn_scale": 0.5,
    },
    "gemma4_text": {
        **LLAMA_LIKE,
        "head_dim": 8,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"],
        "global_head_dim": 16,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 16,
        "final_logit_softcapping": 3.0,
    },
    "deepseek_v32": {**LATENT, **INDEXED},
    "glm_moe_dsa": {**LATENT, **INDEXED, "indexer_types": ["full", "shared"]},
    "exaone_moe": {
        **{key: value for key, value in ROUTED.items() if key not in ("n_routed_experts", "n_shared_experts")},
        **{"num_experts": 4, "num_shared_experts": 2, "head_dim": 8, "sliding_window": WINDOW},
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "solar_open": {
        **{key: value for key, value in ROUTED.items() if key not in ("intermediate_size", "first_k_dense_replace")},
        **{"head_dim": 8, "attention_bias": True},
    },
    "afmoe": {
        **LLAMA_LIKE,
        **EXPERTS,
        "head_dim": 8,
        "num_shared_experts": 2,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"],
        "mup_enabled": True,
    },
    "mimo_v2_flash": {
        **{key: value for key, value in ROUTED.items() if key not in ("n_shared_experts", "first_k_dense_replace")},
        **{"head_dim": 8, "v_head_dim": 6, "attention_value_scale": 0.7, "sliding_window": WINDOW},
        "layer_types": ["sliding_attention", "full_attention"],
        "mlp_layer_types": ["dense", "sparse"],
    },
    "helium": {**LLAMA_LIKE, "head_dim": 8},
    "jais2": {**LLAMA_LIKE, "head_dim": 8},
    "vaultgemma": {
        **LLAMA_LIKE,
        "head_dim": 8,
        "query_pre_attn_scalar": 8,
        "sliding_window": WINDOW,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    },
    "mamba": {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
}


def tiny(family: str, *, dtype: torch.dtype = torch.float64, **changes: Any) -> PreTrainedModel:
    """A model whose weights are large enough that attention and caps are felt, without dropout."""
    torch.manual_seed(0)
    shape = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None}
    config = AutoConfig.for_model(family, **{**shape, **SHAPES[family], **changes})
    for name, value in vars(config).items():
        if "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)
    # Grouped matrix products of experts exist in no float64.
    routed = any(name in vars(config) for name in ("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts"))
    experts = {"experts_implementation": "eager"} if routed else {}
    # transformers 5.17 chooses `sdpa` for bounded scores too, and does not bound them there.
    attention = {"attn_implementation": "eager"} if getattr(config, "attn_logit_softcapping", None) else {}
    model = AutoModelForCausalLM.from_config(config, **experts, **attention).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.2)
        for name, buffer in model.named_buffers():
            if name.endswith("correction_bias"):
                buffer.normal_(std=0.2)
    return model


def deep(family: str, *, layers: int = 4, **changes: Any) -> PreTrainedModel:
    """The same with more blocks, of all kinds that the family has, and 8 heads."""
    keys = {
        "gpt2": ("n_layer", "n_head"),
        "bloom": ("n_layer", "n_head"),
        "gptj": ("n_layer", "n_head"),
        "gpt_neo": ("num_layers", "num_heads"),
    }
    layers_key, heads_key = keys.get(family, ("num_hidden_layers", "num_attention_heads"))
    kinds: dict[str, Any] = {}
    if family == "gpt_neo":
        kinds = {"attention_types": [[["global", "local"], layers // 2]]}
    if family in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"):
        kinds = {"layer_types": ["linear_attention", "full_attention"] * (layers // 2)}
        # With a small epsilon the norm behind linear attention enlarges rounding: a relative change of the embeddings
        # by 1e-15 changes gradients of Qwen 3.5 by 4e-11. `stoker.verify.toy_config.LINEAR_EPSILON` says why.
        kinds["rms_norm_eps"] = 1e-2
    if family in ("gemma2", "gemma3_text", "gemma4_text", "vaultgemma", "exaone_moe", "afmoe", "mimo_v2_flash"):
        kinds = {"layer_types": ["sliding_attention", "full_attention"] * (layers // 2)}
    if family in ("qwen2_moe", "qwen3_moe", "qwen3_next"):
        kinds["mlp_only_layers"] = [1]
    if family in ("glm4_moe_lite", "mimo_v2_flash"):
        kinds["mlp_layer_types"] = ["dense", *["sparse"] * (layers - 1)]
    if family == "llama4_text":
        kinds = {"no_rope_layers": [1, 0] * (layers // 2), "moe_layers": [*range(1, layers)]}
    if family == "glm_moe_dsa":
        kinds = {"indexer_types": ["full"] * layers}
    if family == "helium":
        kinds["head_dim"] = 4  # its output layer is square
    if family in ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "deepseek_v32", "glm_moe_dsa"):
        kinds["num_key_value_heads"] = 8
    return tiny(family, **{layers_key: layers, heads_key: 8, **kinds, **changes})
