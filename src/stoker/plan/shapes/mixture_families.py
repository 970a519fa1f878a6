"""Shapes of families with mixtures of experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from stoker.plan.shape import ExpertMixture, Indexer, Latent, Layer, Shape
from stoker.plan.shapes.common_sizes import LLAMA, decoder
from stoker.plan.shapes.config_keys import Settings
from stoker.plan.shapes.dense_families import qwen3


def sparse_layers(layers: int, dense: Callable[[int], bool]) -> tuple[Layer, ...]:
    """Returns the layers of a model with mixtures in all but its dense layers; empty if all layers have one."""
    if not any(map(dense, range(layers))):
        return ()
    return tuple(Layer(feed_forward="dense" if dense(i) else "experts") for i in range(layers))


def mixtral(c: Settings) -> Shape:
    """Mixtral: every MLP a mixture."""
    experts = ExpertMixture(c.integer("num_experts"), c.integer("num_experts_per_tok"), c.integer("intermediate_size"))
    return decoder(c, **LLAMA, mixture=experts)


def qwen2_moe(c: Settings) -> Shape:
    """Returns the shape of Qwen2-MoE: a gated shared expert in addition to the routed ones."""
    return decoder(c, **LLAMA, qkv_bias=c.flag("qkv_bias"), mixture=shared_expert(c), pattern=qwen_pattern(c))


def shared_expert(c: Settings) -> ExpertMixture:
    return ExpertMixture(
        *(c.integer("num_experts"), c.integer("num_experts_per_tok"), c.integer("moe_intermediate_size")),
        shared_width=c.integer("shared_expert_intermediate_size"),
        shared_gate=True,
    )


def qwen3_moe(c: Settings) -> Shape:
    """Qwen3-MoE: many small experts, no shared one."""
    experts = ExpertMixture(
        c.integer("num_experts"), c.integer("num_experts_per_tok"), c.integer("moe_intermediate_size")
    )
    return replace(qwen3(c), mixture=experts, pattern=qwen_pattern(c))


def qwen_pattern(c: Settings) -> tuple[Layer, ...]:
    step, dense = c.integer("decoder_sparse_step"), c.integers("mlp_only_layers")
    return sparse_layers(c.integer("num_hidden_layers"), lambda i: i in dense or (i + 1) % step != 0)


def glm4_moe(c: Settings) -> Shape:
    """GLM-4.5 and Solar Open: shared and many routed experts behind the first, dense layers."""
    normed = "head" if c.flag("use_qk_norm") else "none"
    facts = {"qkv_bias": c.flag("attention_bias"), "query_key_norm": normed}
    return decoder(c, **LLAMA, **facts, mixture=_deepseek_experts(c), pattern=_deepseek_pattern(c))


def dots1(c: Settings) -> Shape:
    """dots.llm1: GLM-4.5's experts, norms of each head's queries and keys."""
    bias = c.flag("attention_bias")
    return replace(glm4_moe(c), qkv_bias=bias, output_bias=bias, query_key_norm="head")


def exaone_moe(c: Settings) -> Shape:
    """K-EXAONE: GLM-4.5's experts, norms of each head's queries and keys, windows in most layers."""
    return replace(glm4_moe(c), query_key_norm="head")


def afmoe(c: Settings) -> Shape:
    """AFMoE: GLM-4.5's experts with a bias that is not trained, gated attention, norms behind attention and MLP too."""
    shape = exaone_moe(c)
    experts = replace(_deepseek_experts(c), router_bias=True)
    return replace(shape, norms=4, output_bias=shape.qkv_bias, output_gate=True, gate_apart=True, mixture=experts)


def olmoe(c: Settings) -> Shape:
    """OLMoE and MiniMax-M2: a mixture in every layer, norms of all queries and keys."""
    bias = c.flag("attention_bias")
    return replace(mixtral(c), qkv_bias=bias, output_bias=bias, query_key_norm="width")


def granitemoe(c: Settings) -> Shape:
    """Granite MoE: a mixture in every layer."""
    bias = c.flag("attention_bias")
    return replace(mixtral(c), qkv_bias=bias, output_bias=bias)


def phimoe(c: Settings) -> Shape:
    """Phi-3.5 MoE: Mixtral's layers with layer norms."""
    bias = c.flag("attention_bias")
    facts = {"qkv_bias": bias, "output_bias": bias, "head_bias": c.flag("lm_head_bias"), "mixture": mixtral(c).mixture}
    return decoder(c, gated=True, norm_bias=True, **facts)


def ernie4_5_moe(c: Settings) -> Shape:
    """ERNIE 4.5: shared and routed experts in some layers; the router's bias is not trained."""
    bias, layers = c.flag("use_bias"), c.integer("num_hidden_layers")
    start, interval = c.integer("moe_layer_start_index", least=0), c.integer("moe_layer_interval")
    end = c.integer("moe_layer_end_index", least=-1)
    last = layers - 1 if end == -1 else end
    pattern = sparse_layers(layers, lambda i: (i + 1) % interval != 0 or not start <= i <= last)
    experts = replace(_deepseek_experts(c), router_bias=True)
    return decoder(c, **LLAMA, qkv_bias=bias, output_bias=bias, mlp_bias=bias, mixture=experts, pattern=pattern)


def hunyuan_v1_moe(c: Settings) -> Shape:
    """Hunyuan: an MLP for all tokens beside the experts, norms of each head's queries and keys."""
    width = c.integer("intermediate_size")
    chosen = c.value("num_experts_per_tok")  # a number, or a list with one entry per layer
    per_token = max(c.integers("num_experts_per_tok")) if isinstance(chosen, list) else c.integer("num_experts_per_tok")
    experts = ExpertMixture(c.integer("num_experts"), per_token, width, shared_width=width)
    return replace(qwen3(c), mixture=experts)


def deepseek(c: Settings) -> Shape:
    """DeepSeek V2 and V3, Kimi K2: latent attention, shared and many routed experts behind the first, dense layers."""
    sizes = c.integer("qk_nope_head_dim"), c.integer("qk_rope_head_dim"), c.integer("v_head_dim")
    latent = Latent(c.integer("q_lora_rank", 0), c.integer("kv_lora_rank"), *sizes)
    bias = c.flag("attention_bias")
    facts = {"latent": latent, "head_size": latent.value_size, "kv_heads": c.integer("num_attention_heads")}
    experts, pattern = _deepseek_experts(c), _deepseek_pattern(c)
    return decoder(c, **LLAMA, **facts, qkv_bias=bias, output_bias=bias, mixture=experts, pattern=pattern)


def deepseek_v32(c: Settings) -> Shape:
    """DeepSeek V3.2: an indexer in every layer."""
    return replace(deepseek(c), indexer=Indexer(*map(c.integer, ("index_n_heads", "index_head_dim", "index_topk"))))


def glm_moe_dsa(c: Settings) -> Shape:
    """GLM-5: layers may use keys that the indexer of an earlier one has selected."""
    shape = deepseek_v32(c)
    every, offset = max(1, c.integer("index_topk_freq", 1, least=0)), c.integer("index_skip_topk_offset", 2, least=0)
    pattern = [{"F": "full", "S": "shared"}.get(kind, kind) for kind in c.words("index_topk_pattern")]
    kinds = c.words("indexer_types") or pattern
    kinds = kinds or ["shared" if max(i - offset + 1, 0) % every else "full" for i in range(shape.layers)]
    if "shared" not in kinds:
        return shape
    layers = tuple(replace(shape.layer(i), indexed=kinds[i % len(kinds)] == "full") for i in range(shape.layers))
    return replace(shape, pattern=layers, one_stage=True)


def _deepseek_experts(c: Settings) -> ExpertMixture:
    width = c.integer("moe_intermediate_size")
    shared = width * c.integer("n_shared_experts", 0, least=0)
    return ExpertMixture(c.integer("num_experts"), c.integer("num_experts_per_tok"), width, shared_width=shared)


def _deepseek_pattern(c: Settings) -> tuple[Layer, ...]:
    layers, kinds = c.integer("num_hidden_layers"), c.words("mlp_layer_types")
    if kinds:
        return sparse_layers(layers, lambda i: kinds[i % len(kinds)] == "dense")
    first = c.integer("first_k_dense_replace", 1 if c.family in ("glm4_moe_lite", "mimo_v2_flash") else 0, least=0)
    return sparse_layers(layers, lambda i: i < first)


def gpt_oss(c: Settings) -> Shape:
    """GPT-OSS: every MLP a mixture with biases, every second layer with a window, a learnt sink for each head."""
    width, bias = c.integer("intermediate_size"), c.flag("attention_bias")
    experts = ExpertMixture(c.integer("num_experts"), c.integer("num_experts_per_tok"), width, router_bias=True)
    facts = {"qkv_bias": bias, "output_bias": bias, "mlp_bias": True, "mixture": experts}
    return decoder(c, **LLAMA, **facts, layer_vectors=c.integer("num_attention_heads"))


def llama4(c: Settings) -> Shape:
    """Llama 4: a shared and many routed experts in some layers, chunks in those with rotary positions."""
    layers, width, bias = c.integer("num_hidden_layers"), c.integer("intermediate_size"), c.flag("attention_bias")
    step = c.integer("interleave_moe_layer_step")
    sparse = range(step - 1, layers, step) if c.value("moe_layers") is None else c.integers("moe_layers")
    experts = ExpertMixture(c.integer("num_experts"), c.integer("num_experts_per_tok"), width, shared_width=width)
    facts = {"qkv_bias": bias, "output_bias": bias, "mlp_width": c.integer("intermediate_size_mlp")}
    pattern = sparse_layers(layers, lambda i: i not in sparse)
    return decoder(c, **LLAMA, **facts, mixture=experts, pattern=pattern)
