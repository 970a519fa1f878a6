"""Shapes of families whose layers are of several kinds."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any, Literal

from stoker.errors import Problem, UserError
from stoker.plan.shape import DeltaNet, ExpertMixture, Layer, LayerSizes, Shape, StateSpace
from stoker.plan.shapes.common_sizes import LLAMA, decoder
from stoker.plan.shapes.config_keys import Settings
from stoker.plan.shapes.dense_families import qwen3
from stoker.plan.shapes.mixture_families import glm4_moe, qwen_pattern, shared_expert


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
    return replace(shape, mixture=shared_expert(c), pattern=pattern)


def qwen3_next(c: Settings) -> Shape:
    """Qwen3-Next: Qwen 3.5 MoE with some dense layers, and fewer products before its linear attention."""
    shape, sparse = qwen3_5(c), qwen_pattern(c)
    assert shape.delta_net is not None
    net = replace(shape.delta_net, one_product=True)
    if c.value("num_experts") == 0:
        return replace(shape, delta_net=net)
    forwards = [layer.feed_forward for layer in sparse] or ["experts"] * shape.layers
    pattern = tuple(replace(layer, feed_forward=f) for layer, f in zip(shape.pattern, forwards, strict=True))
    return replace(shape, delta_net=net, mixture=shared_expert(c), pattern=pattern)


def mimo(c: Settings) -> Shape:
    """MiMo V2 Flash: layers with a window have twice the key-value heads, and a sink for each head."""
    shape, window = glm4_moe(c), c.integer("sliding_window")
    usual = ["full_attention" if i == 0 or (i + 1) % 6 == 0 else "sliding_attention" for i in range(shape.layers)]
    kinds = c.words("layer_types") or usual

    def layer(index: int) -> Layer:
        if kinds[index % len(kinds)] == "full_attention":
            return replace(shape.layer(index), window=0)
        sizes = LayerSizes(2 * shape.kv_heads, shape.head_size, shape.mlp_width, sinks=shape.heads)
        return replace(shape.layer(index), window=window, sizes=sizes)

    return replace(shape, value_size=c.integer("v_head_dim"), pattern=tuple(map(layer, range(shape.layers))))


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
