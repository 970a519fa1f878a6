"""The architectures that can be written as GGUF, and why a configuration cannot."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from stoker.checkpoint.export import gguf_keys
from stoker.checkpoint.export.gguf_changes import BY_KIND, FLAT, PLUS_ONE, TRANSPOSED, neighbours
from stoker.checkpoint.export.gguf_keys import rope_of
from stoker.checkpoint.export.gguf_layout import GgufFamily

_NEIGHBOURS = {
    "self_attn.q_proj.weight": neighbours("num_attention_heads"),
    "self_attn.k_proj.weight": neighbours("num_key_value_heads"),
}
_GELU = ("gelu_pytorch_tanh", "gelu_new")
_PLAIN: dict[str, tuple[Any, ...]] = {  # of all families that name no other values
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "use_sliding_window": (False,),
}
_EVERY_BLOCK: dict[str, tuple[Any, ...]] = {"decoder_sparse_step": (1,), "mlp_only_layers": ([],)}  # has experts
_EXPERTS = {
    "experts.gate_up_proj": ("ffn_gate_exps.weight", "ffn_up_exps.weight"),
    "experts.down_proj": ("ffn_down_exps.weight",),
}


def _windows(period: int) -> Any:
    """llama.cpp gives a window to all but the last of each ``period`` blocks."""

    def problems(config: dict[str, Any]) -> Iterator[str]:
        kinds = config.get("layer_types") or []
        wanted = ["full_attention" if (i + 1) % period == 0 else "sliding_attention" for i in range(len(kinds))]
        if kinds != wanted:
            yield f"its blocks with full attention are not each {period}th"

    return problems


def _query_scale(config: dict[str, Any], *, large: int) -> Iterator[str]:
    """llama.cpp knows the model with other scores by its number of blocks."""
    size = config["head_dim"]
    if config["num_hidden_layers"] == large:
        size = config["hidden_size"] // config["num_attention_heads"]
    if config.get("query_pre_attn_scalar", size) != size:
        yield f"query_pre_attn_scalar is {config['query_pre_attn_scalar']}, and llama.cpp uses {size}"


def _gemma2_scale(config: dict[str, Any]) -> Iterator[str]:
    return _query_scale(config, large=46)


def _gemma3_scale(config: dict[str, Any]) -> Iterator[str]:
    return _query_scale(config, large=62)


def _rotated_blocks(config: dict[str, Any]) -> Iterator[str]:
    rotated = config.get("no_rope_layers") or []
    if rotated != [int((i + 1) % 4 != 0) for i in range(len(rotated))]:
        yield "its blocks without rotation are not each 4th"


LLAMA = GgufFamily("llama", changes=_NEIGHBOURS, ropes=("default", "linear", "llama3"))
GEMMA = GgufFamily(
    "gemma", changes={"norm.weight": PLUS_ONE}, activations=_GELU, needs={"tie_word_embeddings": (True,)}
)

FAMILIES = {
    "LlamaForCausalLM": LLAMA,
    "MistralForCausalLM": LLAMA,
    "MixtralForCausalLM": replace(LLAMA, parts=_EXPERTS, keys=(gguf_keys.experts,)),
    "Qwen2ForCausalLM": GgufFamily("qwen2"),
    "Qwen2MoeForCausalLM": GgufFamily(
        "qwen2moe",
        changes={"shared_expert_gate.weight": FLAT},
        parts=_EXPERTS,
        keys=(gguf_keys.experts, gguf_keys.shared_expert),
        needs=_EVERY_BLOCK | {"norm_topk_prob": (False,), "tie_word_embeddings": (False,), "qkv_bias": (True,)},
    ),
    "Qwen3ForCausalLM": GgufFamily("qwen3"),
    "Qwen3MoeForCausalLM": GgufFamily(
        "qwen3moe",
        parts=_EXPERTS,
        keys=(gguf_keys.experts,),
        needs=_EVERY_BLOCK | {"norm_topk_prob": (True,)},
    ),
    "GemmaForCausalLM": GEMMA,
    "Gemma2ForCausalLM": replace(
        GEMMA,
        name="gemma2",
        keys=(gguf_keys.sliding_window, gguf_keys.soft_caps),
        problems=(_windows(2), _gemma2_scale),
        windows=True,
    ),
    "Gemma3ForCausalLM": replace(
        GEMMA,
        name="gemma3",
        keys=(gguf_keys.sliding_window, gguf_keys.window_rope),
        needs=dict(GEMMA.needs) | {"attn_logit_softcapping": (None,), "final_logit_softcapping": (None,)},
        problems=(_windows(6), _gemma3_scale),
        windows=True,
    ),
    "Phi3ForCausalLM": GgufFamily("phi3", keys=(gguf_keys.no_window,), partial=True),
    "GlmForCausalLM": GgufFamily("chatglm", needs={"attention_bias": (True, False)}, partial=True),
    "Glm4ForCausalLM": GgufFamily("glm4", needs={"attention_bias": (True, False)}, partial=True),
    "GPT2LMHeadModel": GgufFamily(
        "gpt2",
        changes={f"{layer}.weight": TRANSPOSED for layer in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")},
        needs={
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
            "add_cross_attention": (False,),
        },
        activations=_GELU,
        ropes=(),
    ),
    "BloomForCausalLM": GgufFamily(
        "bloom",
        changes={"query_key_value.weight": BY_KIND, "query_key_value.bias": BY_KIND},
        needs={"apply_residual_connection_post_layernorm": (False,)},
        ropes=(),
    ),
    "GPTNeoXForCausalLM": GgufFamily(
        "gptneox",
        changes={"query_key_value.weight": BY_KIND, "query_key_value.bias": BY_KIND},
        keys=(gguf_keys.parallel_residual,),
        needs={"attention_bias": (True,)},
        activations=(*_GELU, "gelu"),
        partial=True,
    ),
    "SmolLM3ForCausalLM": replace(LLAMA, name="smollm3", ropes=("default", "linear"), problems=(_rotated_blocks,)),
    "Olmo2ForCausalLM": GgufFamily("olmo2"),
    "GraniteForCausalLM": replace(LLAMA, name="granite", keys=(gguf_keys.granite_scales,), ropes=("default", "linear")),
    "Starcoder2ForCausalLM": GgufFamily("starcoder2", activations=_GELU, needs={"use_bias": (True,)}),
}


READ_BY_TRANSFORMERS = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


def gguf_problem(config: dict[str, Any]) -> str | None:
    """Returns why a model of this ``config.json`` cannot be written as GGUF; None when it can."""
    return next(_problems(config), None)


def _problems(config: dict[str, Any]) -> Iterator[str]:
    architecture = (config.get("architectures") or ["(none named)"])[0]
    family = FAMILIES.get(architecture)
    if family is None:
        yield f"the architecture {architecture} is none of {', '.join(FAMILIES)}"
        return
    if config.get("quantization_config"):
        yield "the weights are quantised; GGUF needs them as they were before"
    # Renamed in transformers 5.
    rope = rope_of(config.get("rope_parameters") or config.get("rope_scaling") or {})
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if family.ropes and kind not in family.ropes:
        yield f"rope scaling {kind!r} is none of {', '.join(family.ropes)}"
    part = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    if part != 1.0 and not family.partial:
        yield "only a part of each head is rotated"
    names = ("hidden_activation", "activation_function", "hidden_act")
    activation = next((config[name] for name in names if config.get(name)), family.activations[0])
    if activation not in family.activations:
        yield f"the activation is {activation}, and llama.cpp computes {' or '.join(family.activations)}"
    for key, values in (_PLAIN | dict(family.needs)).items():
        if config.get(key, values[0]) not in values:
            yield f"{key} is {config[key]}, and llama.cpp takes {' or '.join(map(str, values))}"
    for problems in family.problems:
        yield from problems(config)
