"""One function for each kind of architecture: from the keys of its configuration to its shape.

The facts (which products have a bias, how many norms, which layers are sparse) are those of the models' code in
transformers 5; a test counts every family against it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any, Literal

from stoker.errors import Problem, UserError
from stoker.plan.shape import DeltaNet, ExpertMixture, Latent, Layer, LayerSizes, Shape, StateSpace
from stoker.plan.shapes.common_sizes import GPT, LLAMA, decoder
from stoker.plan.shapes.config_keys import Settings


def _sparse(layers: int, dense: Callable[[int], bool]) -> tuple[Layer, ...]:
    """Returns the layers of a model with mixtures in all but its dense layers; empty if all layers have one."""
    if not any(map(dense, range(layers))):
        return ()
    return tuple(Layer(feed_forward="dense" if dense(i) else "experts") for i in range(layers))


def gpt2(c: Settings) -> Shape:
    """GPT-2, GPT-3 and Megatron-LM's GPT: learnt positions, biases everywhere."""
    return decoder(c, **GPT, positions=c.integer("max_position_embeddings"), fused_qkv=True, splits_fused=True)


def bloom(c: Settings) -> Shape:
    """BLOOM: ALiBi, a norm after the embedding."""
    return decoder(c, **GPT, embedding_norm=True, fused_qkv=True)


def opt(c: Settings) -> Shape:
    """OPT: two rows of positions more than there are; the 350M model projects its embedding and ends with no norm."""
    bias = c.flag("enable_bias")
    embedding, width = c.integer("word_embed_proj_dim", c.integer("hidden_size")), c.integer("hidden_size")
    final = c.flag("do_layer_norm_before") and not c.flag("_remove_final_layer_norm")
    positions = c.integer("max_position_embeddings") + 2
    facts = {"qkv_bias": bias, "output_bias": bias, "mlp_bias": bias, "norm_bias": True}
    projected = 0 if embedding == width else embedding
    return decoder(c, **facts, positions=positions, final_norms=int(final), embedding_width=projected)


def gpt_neo(c: Settings) -> Shape:
    """GPT-Neo: every second layer attends to a window; queries, keys and values without bias."""
    positions = c.integer("max_position_embeddings")
    return decoder(c, norm_bias=True, output_bias=True, mlp_bias=True, positions=positions)


def gptj(c: Settings) -> Shape:
    """GPT-J: attention and MLP behind one norm; a head with a bias."""
    return decoder(c, norm_bias=True, norms=1, mlp_bias=True, head_bias=True, parallel_residual=True)


def gpt_neox(c: Settings) -> Shape:
    """GPT-NeoX and Pythia: attention and MLP side by side, each with its norm."""
    bias = c.flag("attention_bias")
    facts = {**GPT, "qkv_bias": bias, "output_bias": bias}
    return decoder(c, **facts, fused_qkv=True, parallel_residual=c.flag("use_parallel_residual"))


def llama(c: Settings) -> Shape:
    """Llama, SmolLM, Granite and all that follow them."""
    bias = c.flag("attention_bias")
    return decoder(c, **LLAMA, qkv_bias=bias, output_bias=bias, mlp_bias=c.flag("mlp_bias"))


def mixtral(c: Settings) -> Shape:
    """Mixtral: every MLP a mixture."""
    experts = ExpertMixture(c.integer("num_experts"), c.integer("num_experts_per_tok"), c.integer("intermediate_size"))
    return decoder(c, **LLAMA, mixture=experts)


def qwen2(c: Settings) -> Shape:
    """Qwen2: a bias on queries, keys and values."""
    return decoder(c, **LLAMA, qkv_bias=True)


def qwen2_moe(c: Settings) -> Shape:
    """Returns the shape of Qwen2-MoE: a gated shared expert in addition to the routed ones."""
    return decoder(c, **LLAMA, qkv_bias=c.flag("qkv_bias"), mixture=_shared_expert(c), pattern=_qwen_pattern(c))


def _shared_expert(c: Settings) -> ExpertMixture:
    return ExpertMixture(
        *(c.integer("num_experts"), c.integer("num_experts_per_tok"), c.integer("moe_intermediate_size")),
        shared_width=c.integer("shared_expert_intermediate_size"),
        shared_gate=True,
    )


def qwen3(c: Settings) -> Shape:
    """Qwen3: norms of each head's queries and keys."""
    bias = c.flag("attention_bias")
    return decoder(c, **LLAMA, qkv_bias=bias, output_bias=bias, query_key_norm="head")


def qwen3_moe(c: Settings) -> Shape:
    """Qwen3-MoE: many small experts, no shared one."""
    experts = ExpertMixture(
        c.integer("num_experts"), c.integer("num_experts_per_tok"), c.integer("moe_intermediate_size")
    )
    return replace(qwen3(c), mixture=experts, pattern=_qwen_pattern(c))


def _qwen_pattern(c: Settings) -> tuple[Layer, ...]:
    step, dense = c.integer("decoder_sparse_step"), c.integers("mlp_only_layers")
    return _sparse(c.integer("num_hidden_layers"), lambda i: i in dense or (i + 1) % step != 0)


def qwen3_5(c: Settings) -> Shape:
    """Qwen 3.5: linear attention in most layers, and attention with a gate of its result in the others."""
    layers, every = c.integer("num_hidden_layers"), c.integer("full_attention_interval", 4)
    usual = ["linear_attention" if (i + 1) % every else "full_attention" for i in range(layers)]
    kinds = c.words("layer_types") or usual
    net = DeltaNet(
        *(c.integer("linear_num_key_heads"), c.integer("linear_num_value_heads")),
        *(c.integer("linear_key_head_dim"), c.integer("linear_value_head_dim"), c.integer("linear_conv_kernel_dim")),
    )
    of_kind = {"linear_attention": Layer(attentions=0, linear=True), "full_attention": Layer()}
    _check_kinds(c, kinds, of_kind)
    pattern = tuple(of_kind[kinds[i % len(kinds)]] for i in range(layers))
    return replace(qwen3(c), delta_net=net, output_gate=True, splits_fused=True, pattern=pattern)


def qwen3_5_moe(c: Settings) -> Shape:
    """Qwen 3.5 MoE: a mixture in every layer, with a gated shared expert."""
    shape = qwen3_5(c)
    pattern = tuple(replace(layer, feed_forward="experts") for layer in shape.pattern)
    return replace(shape, mixture=_shared_expert(c), pattern=pattern)


def qwen3_next(c: Settings) -> Shape:
    """Qwen3-Next: Qwen 3.5 MoE with some dense layers, and fewer products before its linear attention."""
    shape, sparse = qwen3_5(c), _qwen_pattern(c)
    assert shape.delta_net is not None
    net = replace(shape.delta_net, one_product=True)
    if c.value("num_experts") == 0:
        return replace(shape, delta_net=net)
    forwards = [layer.feed_forward for layer in sparse] or ["experts"] * shape.layers
    pattern = tuple(replace(layer, feed_forward=f) for layer, f in zip(shape.pattern, forwards, strict=True))
    return replace(shape, delta_net=net, mixture=_shared_expert(c), pattern=pattern)


def glm(c: Settings) -> Shape:
    """GLM-4 (9B): two key-value heads, gate and product upwards in one module."""
    return decoder(c, **LLAMA, qkv_bias=c.flag("attention_bias"), fused_gate=True, splits_fused=True)


def glm4(c: Settings) -> Shape:
    """GLM-4-0414: norms behind attention and MLP as well."""
    return replace(glm(c), norms=4)


def glm4_moe(c: Settings) -> Shape:
    """GLM-4.5: shared and many routed experts behind the first, dense layers."""
    normed = "head" if c.flag("use_qk_norm") else "none"
    facts = {"qkv_bias": c.flag("attention_bias"), "query_key_norm": normed}
    return decoder(c, **LLAMA, **facts, mixture=_deepseek_experts(c), pattern=_deepseek_pattern(c))


def dots1(c: Settings) -> Shape:
    """dots.llm1: GLM-4.5's experts, norms of each head's queries and keys."""
    bias = c.flag("attention_bias")
    return replace(glm4_moe(c), qkv_bias=bias, output_bias=bias, query_key_norm="head")


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
    pattern = _sparse(layers, lambda i: (i + 1) % interval != 0 or not start <= i <= last)
    experts = replace(_deepseek_experts(c), router_bias=True)
    return decoder(c, **LLAMA, qkv_bias=bias, output_bias=bias, mlp_bias=bias, mixture=experts, pattern=pattern)


def hunyuan_v1_moe(c: Settings) -> Shape:
    """Hunyuan: an MLP for all tokens beside the experts, norms of each head's queries and keys."""
    width = c.integer("intermediate_size")
    chosen = c.value("num_experts_per_tok")  # a number, or a list with one entry per layer
    per_token = max(c.integers("num_experts_per_tok")) if isinstance(chosen, list) else c.integer("num_experts_per_tok")
    experts = ExpertMixture(c.integer("num_experts"), per_token, width, shared_width=width)
    return replace(qwen3(c), mixture=experts)


def gemma(c: Settings) -> Shape:
    """Gemma: wide heads, a large tied vocabulary."""
    bias = c.flag("attention_bias")
    return decoder(c, **LLAMA, qkv_bias=bias, output_bias=bias)


def gemma2(c: Settings) -> Shape:
    """Gemma 2: four norms a layer, every second layer with a window."""
    return replace(gemma(c), norms=4)


def gemma3(c: Settings) -> Shape:
    """Gemma 3: five layers with a window to one without, norms of queries and keys."""
    return replace(gemma2(c), query_key_norm="head")


GLOBAL_HEAD = 512  # of Gemma 4's layers with full attention, if its configuration states none


def gemma4(c: Settings) -> Shape:
    """Gemma 4: other heads in layers with full attention; experts beside the MLP, or an embedding for every layer."""
    layers, width, hidden = (c.integer(key) for key in ("num_hidden_layers", "hidden_size", "intermediate_size"))
    bias, inputs = c.flag("attention_bias"), c.integer("hidden_size_per_layer_input", 0, least=0)
    borrowing = c.integer("num_kv_shared_layers", 0, least=0)
    kinds = c.words("layer_types") or [_every_sixth(i) for i in range(layers)]
    by_layer = c.value("per_layer_config")  # in files that transformers has written

    def sizes(i: int) -> LayerSizes:
        full = kinds[i % len(kinds)] == "full_attention" or i == layers - 1
        same = c.flag("attention_k_eq_v") and full
        heads = c.value("num_global_key_value_heads") if same else None
        stated: Any = {"head_dim": c.integer("global_head_dim", GLOBAL_HEAD), "num_key_value_heads": heads}
        if isinstance(by_layer, dict):
            stated = by_layer.get(str(i))
        others = stated.items() if full and isinstance(stated, dict) else ()
        own = Settings({**c.config, **{key: value for key, value in others if value}}, family=c.family, place=c.place)
        borrows = i >= layers - borrowing
        wide = 2 if borrows and c.flag("use_double_wide_mlp") else 1
        projects: Literal["qkv", "qk", "q"] = "q" if borrows else "qk" if same else "qkv"
        return LayerSizes(own.integer("num_key_value_heads"), own.integer("head_dim"), wide * hidden, projects)

    facts: dict[str, Any] = {"norms": 4, "query_key_norm": "head", "qkv_bias": bias, "output_bias": bias}
    vectors, outside = 0, 0
    if c.flag("enable_moe_block"):
        experts, per_token = c.integer("num_experts"), c.integer("top_k_experts")
        facts["mixture"] = ExpertMixture(experts, per_token, c.integer("moe_intermediate_size"), shared_width=hidden)
        vectors += 4 * width + experts  # three norms, and the router's scales of its inputs and of each expert
    if inputs:
        vectors += width
        outside = layers * inputs * (c.integer("vocab_size_per_layer_input") + width) + inputs
    kind: Literal["dense", "experts"] = "experts" if "mixture" in facts else "dense"
    pattern = tuple(Layer(feed_forward=kind, sizes=sizes(i)) for i in range(layers))
    facts |= {"layer_input_width": inputs, "one_stage": bool(inputs or borrowing), "pattern": pattern}
    shape = decoder(c, **LLAMA, **facts, layer_vectors=vectors, outside_vectors=outside)
    return replace(shape, pattern=(*shape.pattern[:-1], replace(shape.pattern[-1], window=0)))  # whatever its kind


def _every_sixth(layer: int) -> str:
    return "full_attention" if (layer + 1) % 6 == 0 else "sliding_attention"


def phi(c: Settings) -> Shape:
    """Phi-1 and 2: attention and MLP behind one norm, biases everywhere."""
    normed = "head" if c.flag("qk_layernorm") else "none"
    return decoder(c, **GPT, norms=1, head_bias=True, parallel_residual=True, query_key_norm=normed)


def phi3(c: Settings) -> Shape:
    """Phi-3 and 4: as Llama, its products fused."""
    return decoder(c, **LLAMA, fused_qkv=True, fused_gate=True, splits_fused=True)


def cohere(c: Settings) -> Shape:
    """Command R: attention and MLP behind one norm without a bias, a large tied vocabulary."""
    bias, normed = c.flag("attention_bias"), "width" if c.flag("use_qk_norm") else "none"
    facts = {"qkv_bias": bias, "output_bias": bias, "query_key_norm": normed}
    return decoder(c, **facts, gated=True, norms=1, parallel_residual=True)


def falcon(c: Settings) -> Shape:
    """Falcon: one key-value head, or few in the newer architecture."""
    bias, new, parallel = c.flag("bias"), c.flag("new_decoder_architecture"), c.flag("parallel_attn")
    heads = c.integer("num_attention_heads")
    kv_heads = 1 if c.flag("multi_query") and not new else c.integer("num_key_value_heads", heads)
    norms = c.integer("num_ln_in_parallel_attn", 2) if new else 1 if parallel else 2
    facts = {"qkv_bias": bias, "output_bias": bias, "mlp_bias": bias, "norm_bias": True, "kv_heads": kv_heads}
    facts["mlp_width"] = c.integer("ffn_hidden_size", 4 * c.integer("hidden_size"))
    return decoder(c, **facts, norms=norms, fused_qkv=True, parallel_residual=new or parallel)


def olmo2(c: Settings) -> Shape:
    """OLMo 2: norms behind attention and MLP, and of all queries and keys."""
    bias = c.flag("attention_bias")
    return decoder(c, **LLAMA, qkv_bias=bias, output_bias=bias, query_key_norm="width")


def deepseek(c: Settings) -> Shape:
    """DeepSeek V2 and V3, Kimi K2: latent attention, shared and many routed experts behind the first, dense layers."""
    sizes = c.integer("qk_nope_head_dim"), c.integer("qk_rope_head_dim"), c.integer("v_head_dim")
    latent = Latent(c.integer("q_lora_rank", 0), c.integer("kv_lora_rank"), *sizes)
    bias = c.flag("attention_bias")
    facts = {"latent": latent, "head_size": latent.value_size, "kv_heads": c.integer("num_attention_heads")}
    experts, pattern = _deepseek_experts(c), _deepseek_pattern(c)
    return decoder(c, **LLAMA, **facts, qkv_bias=bias, output_bias=bias, mixture=experts, pattern=pattern)


def _deepseek_experts(c: Settings) -> ExpertMixture:
    width = c.integer("moe_intermediate_size")
    shared = width * c.integer("n_shared_experts", 0, least=0)
    return ExpertMixture(c.integer("num_experts"), c.integer("num_experts_per_tok"), width, shared_width=shared)


def _deepseek_pattern(c: Settings) -> tuple[Layer, ...]:
    layers, kinds = c.integer("num_hidden_layers"), c.words("mlp_layer_types")
    if kinds:
        return _sparse(layers, lambda i: kinds[i % len(kinds)] == "dense")
    first = c.integer("first_k_dense_replace", 1 if c.family == "glm4_moe_lite" else 0, least=0)
    return _sparse(layers, lambda i: i < first)


def mpt(c: Settings) -> Shape:
    """MPT: ALiBi, no biases; ``expansion_ratio`` is ignored, as in transformers."""
    return decoder(c, fused_qkv=True)


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
    pattern = _sparse(layers, lambda i: i not in sparse)
    return decoder(c, **LLAMA, **facts, mixture=experts, pattern=pattern)


def starcoder2(c: Settings) -> Shape:
    """StarCoder2: plain MLPs, few key-value heads."""
    bias = c.flag("use_bias")
    return decoder(c, norm_bias=True, qkv_bias=bias, output_bias=bias, mlp_bias=bias)


def _check_kinds(c: Settings, kinds: list[str], known: Collection[str]) -> None:
    unknown = next((kind for kind in kinds if kind not in known), None)
    if unknown is not None:
        raise UserError(Problem(f"unknown layer {unknown!r} in the configuration ({c.family})", file=c.place))


# The signs and the names of the kinds of layers in a hybrid.
HYBRID = {
    **dict.fromkeys(("M", "mamba", "linear_attention"), Layer(0, "none", state_space=True)),
    **dict.fromkeys(("*", "attention", "full_attention"), Layer(1, "none")),
    **dict.fromkeys(("-", "mlp"), Layer(0, "dense")),
    **dict.fromkeys(("E", "moe"), Layer(0, "experts")),
}


def nemotron_h(c: Settings) -> Shape:
    """Nemotron-H and Nemotron 3: each layer a Mamba-2 mixer, attention, an MLP or a mixture, behind one norm."""
    kinds = c.words("layers_block_type") or c.words("hybrid_override_pattern")
    if not kinds:
        raise UserError(Problem(f"no `layers_block_type` in the configuration ({c.family})", file=c.place))
    _check_kinds(c, kinds, HYBRID)
    space = StateSpace(
        *(c.integer("mamba_num_heads"), c.integer("mamba_head_dim"), c.integer("n_groups")),
        *(c.integer("ssm_state_size"), c.integer("conv_kernel")),
    )
    experts = ExpertMixture(
        *(c.integer("num_experts"), c.integer("num_experts_per_tok"), c.integer("moe_intermediate_size")),
        shared_width=c.integer("moe_shared_expert_intermediate_size") * c.integer("n_shared_experts", 0, least=0),
        latent_width=c.integer("moe_latent_size", 0),
    )
    pattern = tuple(HYBRID[kind] for kind in kinds)
    mixture = experts if any(layer.feed_forward == "experts" for layer in pattern) else None
    facts = {"norm": "rms", "norms": 1, "state_space": space, "mixture": mixture}
    return decoder(c, **facts, layers=len(pattern), pattern=pattern)


def t5(c: Settings) -> Shape:
    """T5 and mT5 as one stack: the encoder's layers, then the decoder's with their cross-attention."""
    encoder = c.integer("num_hidden_layers")
    pattern = (Layer(),) * encoder + (Layer(attentions=2),) * c.integer("num_decoder_layers", encoder)
    biases = 2 * c.integer("relative_attention_num_buckets") * c.integer("num_attention_heads")
    gated = str(c.value("feed_forward_proj")).startswith("gated")
    facts = {"norm": "rms", "gated": gated, "final_norms": 2, "outside_vectors": biases}
    return decoder(c, **facts, layers=len(pattern), pattern=pattern)


FAMILIES: dict[str, Callable[[Settings], Shape]] = {
    **{"gpt2": gpt2, "bloom": bloom, "opt": opt, "gpt_neo": gpt_neo, "gptj": gptj, "gpt_neox": gpt_neox},
    **dict.fromkeys(("llama", "mistral", "granite", "smollm3"), llama),
    **{"mixtral": mixtral, "qwen2": qwen2, "qwen2_moe": qwen2_moe, "qwen3": qwen3, "qwen3_moe": qwen3_moe},
    **{"glm": glm, "glm4": glm4, "glm4_moe": glm4_moe, "gemma": gemma, "gemma2": gemma2, "gemma3_text": gemma3},
    "gemma4_text": gemma4,
    **{"phi": phi, "phi3": phi3, "cohere": cohere, "cohere2": cohere, "falcon": falcon, "olmo2": olmo2},
    **{"deepseek_v2": deepseek, "deepseek_v3": deepseek, "mpt": mpt, "gpt_oss": gpt_oss, "starcoder2": starcoder2},
    **{"dots1": dots1, "glm4_moe_lite": deepseek, "olmoe": olmoe, "minimax_m2": olmoe, "granitemoe": granitemoe},
    **{"ernie4_5_moe": ernie4_5_moe, "hunyuan_v1_moe": hunyuan_v1_moe, "phimoe": phimoe, "llama4_text": llama4},
    **{"qwen3_next": qwen3_next, "qwen3_5_text": qwen3_5, "qwen3_5_moe_text": qwen3_5_moe},
    **{"nemotron_h": nemotron_h, "t5": t5, "mt5": t5},
}
