"""Shapes of families whose layers are alike, with one MLP each."""

from __future__ import annotations

from dataclasses import replace

from stoker.plan.shape import Shape
from stoker.plan.shapes.common_sizes import GPT, LLAMA, decoder
from stoker.plan.shapes.config_keys import Settings


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


def qwen2(c: Settings) -> Shape:
    """Qwen2: a bias on queries, keys and values."""
    return decoder(c, **LLAMA, qkv_bias=True)


def qwen3(c: Settings) -> Shape:
    """Qwen3: norms of each head's queries and keys."""
    bias = c.flag("attention_bias")
    return decoder(c, **LLAMA, qkv_bias=bias, output_bias=bias, query_key_norm="head")


def glm(c: Settings) -> Shape:
    """GLM-4 (9B): two key-value heads, gate and product upwards in one module."""
    return decoder(c, **LLAMA, qkv_bias=c.flag("attention_bias"), fused_gate=True, splits_fused=True)


def glm4(c: Settings) -> Shape:
    """GLM-4-0414: norms behind attention and MLP as well."""
    return replace(glm(c), norms=4)


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


def mpt(c: Settings) -> Shape:
    """MPT: ALiBi, no biases; ``expansion_ratio`` is ignored, as in transformers."""
    return decoder(c, fused_qkv=True)


def starcoder2(c: Settings) -> Shape:
    """StarCoder2: plain MLPs, few key-value heads."""
    bias = c.flag("use_bias")
    return decoder(c, norm_bias=True, qkv_bias=bias, output_bias=bias, mlp_bias=bias)
