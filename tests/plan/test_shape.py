"""Shapes against transformers' own models, built without memory, and against published figures."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from counted import forward_flop_per_token, lora_parameters
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from stoker.plan.layer import RULE_CHUNK, DeltaNet
from stoker.plan.shape import Shape
from stoker.plan.shapes import shape_named, shape_of_config
from stoker.plan.shapes.config_keys import DEFAULTS, NAMES
from stoker.plan.shapes.families import FAMILIES
from stoker.plan.shapes.known_models import CATALOGUE
from stoker.plan.time.flop import attended_tokens


def on_meta(config: dict[str, Any]) -> torch.nn.Module:
    """transformers' model of a configuration, without memory."""
    build = AutoModelForSeq2SeqLM if config["model_type"] in {"t5", "mt5"} else AutoModelForCausalLM
    with torch.device("meta"):
        return build.from_config(AutoConfig.for_model(**config))


def counted(config: dict[str, Any]) -> int:
    return sum(parameter.numel() for parameter in on_meta(config).parameters())


# Numbers that differ from each other and from the defaults, so that no two can be mistaken.
LLAMA = {
    "vocab_size": 101, "hidden_size": 48, "intermediate_size": 130, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2,
}  # fmt: skip
PLAIN = {key: value for key, value in LLAMA.items() if key not in {"num_key_value_heads", "intermediate_size"}}
GPT = {"vocab_size": 101, "n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": 32}
SPARSE = {"num_experts_per_tok": 2, "moe_intermediate_size": 21}
DELTA_NET = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 8, "linear_value_head_dim": 10,
    "linear_conv_kernel_dim": 3,
}  # fmt: skip
DEEPSEEK = {
    "q_lora_rank": 11, "kv_lora_rank": 13, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 10,
    "n_routed_experts": 5, "n_shared_experts": 2, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, **SPARSE,
}  # fmt: skip
INDEXED = {"index_n_heads": 7, "index_head_dim": 9, "index_topk": 6}
TINY: list[dict[str, Any]] = [
    {"model_type": "gpt2", **GPT},
    {"model_type": "gpt2", **GPT, "n_inner": 100, "tie_word_embeddings": False},
    {"model_type": "bloom", "vocab_size": 101, "hidden_size": 48, "n_layer": 3, "n_head": 6},
    {"model_type": "opt", **PLAIN, "ffn_dim": 130, "word_embed_proj_dim": 48},
    {"model_type": "opt", **PLAIN, "ffn_dim": 130, "word_embed_proj_dim": 24, "do_layer_norm_before": False},
    {"model_type": "opt", **PLAIN, "ffn_dim": 130, "word_embed_proj_dim": 48, "enable_bias": False},
    {"model_type": "gpt_neo", "vocab_size": 101, "hidden_size": 48, "num_layers": 4, "num_heads": 6,
     "attention_types": [[["global", "local"], 2]], "max_position_embeddings": 32},
    {"model_type": "gptj", **GPT, "rotary_dim": 4},
    {"model_type": "gpt_neox", **PLAIN, "intermediate_size": 130},
    {"model_type": "gpt_neox", **PLAIN, "intermediate_size": 130, "attention_bias": False, "tie_word_embeddings": True},
    {"model_type": "llama", **LLAMA},
    {"model_type": "llama", **LLAMA, "head_dim": 12, "attention_bias": True, "mlp_bias": True},
    {"model_type": "llama", **LLAMA, "num_key_value_heads": None, "tie_word_embeddings": True},
    {"model_type": "mistral", **LLAMA},
    {"model_type": "mixtral", **LLAMA, "num_local_experts": 5, "num_experts_per_tok": 2},
    {"model_type": "qwen2", **LLAMA},
    {"model_type": "qwen2_moe", **LLAMA, **SPARSE, "num_experts": 5, "shared_expert_intermediate_size": 33},
    {"model_type": "qwen2_moe", **LLAMA, **SPARSE, "num_experts": 5, "decoder_sparse_step": 2, "qkv_bias": False},
    {"model_type": "qwen3", **LLAMA, "head_dim": 12, "attention_bias": True},
    {"model_type": "qwen3_moe", **LLAMA, **SPARSE, "num_experts": 5, "mlp_only_layers": [1]},
    {"model_type": "qwen3_next", **LLAMA, **SPARSE, **DELTA_NET, "num_experts": 5, "head_dim": 12,
     "shared_expert_intermediate_size": 33, "mlp_only_layers": [1]},
    {"model_type": "qwen3_next", **LLAMA, **DELTA_NET, "head_dim": 12, "full_attention_interval": 2, "num_experts": 0},
    {"model_type": "qwen3_5_text", **LLAMA, **DELTA_NET, "head_dim": 12, "attention_bias": True,
     "layer_types": ["full_attention", "linear_attention", "linear_attention"]},
    {"model_type": "qwen3_5_moe_text", **{k: v for k, v in LLAMA.items() if k != "intermediate_size"}, **SPARSE,
     **DELTA_NET, "head_dim": 12, "num_experts": 5, "shared_expert_intermediate_size": 33},
    {"model_type": "glm", **LLAMA, "head_dim": 12, "pad_token_id": 0},
    {"model_type": "glm4", **LLAMA, "head_dim": 12, "pad_token_id": 0},
    {"model_type": "glm4_moe", **LLAMA, **SPARSE, "n_routed_experts": 5, "head_dim": 12, "use_qk_norm": True},
    {"model_type": "gemma", **LLAMA, "head_dim": 12},
    {"model_type": "gemma2", **LLAMA, "head_dim": 12},
    {"model_type": "gemma3_text", **LLAMA, "head_dim": 12},
    {"model_type": "gemma4_text", **LLAMA, "head_dim": 12, "global_head_dim": 20, "vocab_size_per_layer_input": 77,
     "hidden_size_per_layer_input": 10},
    {"model_type": "gemma4_text", **LLAMA, "num_hidden_layers": 8, "head_dim": 12, "attention_k_eq_v": True,
     "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0, "enable_moe_block": True, "num_experts": 5,
     "top_k_experts": 2, "moe_intermediate_size": 21},
    {"model_type": "gemma4_text", **LLAMA, "num_hidden_layers": 8, "head_dim": 12, "use_double_wide_mlp": True,
     "layer_types": ["sliding_attention", "full_attention"] * 4, "num_kv_shared_layers": 3, "attention_bias": True},
    {"model_type": "phi", **LLAMA, "qk_layernorm": True},
    {"model_type": "phi", **LLAMA},
    {"model_type": "phi3", **LLAMA, "pad_token_id": 0},
    {"model_type": "cohere", **LLAMA},
    {"model_type": "cohere", **LLAMA, "use_qk_norm": True, "attention_bias": True},
    {"model_type": "cohere2", **LLAMA, "head_dim": 12},
    {"model_type": "falcon", **PLAIN},
    {"model_type": "falcon", **PLAIN, "num_kv_heads": 2, "new_decoder_architecture": True, "bias": True},
    {"model_type": "falcon", **PLAIN, "parallel_attn": False, "multi_query": False, "alibi": True},
    {"model_type": "granite", **LLAMA},
    {"model_type": "smollm3", **LLAMA, "pad_token_id": 0},
    {"model_type": "starcoder2", **LLAMA, "use_bias": False},
    {"model_type": "olmo2", **LLAMA},
    {"model_type": "deepseek_v2", **LLAMA, **DEEPSEEK},
    {"model_type": "deepseek_v2", **LLAMA, **DEEPSEEK, "q_lora_rank": None},
    {"model_type": "deepseek_v3", **LLAMA, **DEEPSEEK, "attention_bias": True},
    {"model_type": "deepseek_v32", **LLAMA, **DEEPSEEK, **INDEXED, "attention_bias": True},
    {"model_type": "glm_moe_dsa", **LLAMA, **DEEPSEEK, **INDEXED, "indexer_types": ["full", "shared", "full"]},
    {"model_type": "glm_moe_dsa", **LLAMA, **DEEPSEEK, **INDEXED, "index_topk_pattern": "FSS"},
    {"model_type": "glm_moe_dsa", **LLAMA, **DEEPSEEK, **INDEXED, "index_topk_freq": 2},
    {"model_type": "exaone_moe", **LLAMA, **SPARSE, "head_dim": 12, "num_experts": 5, "num_shared_experts": 2},
    {"model_type": "exaone_moe", **LLAMA, **SPARSE, "num_experts": 5, "mlp_layer_types": ["sparse", "dense", "sparse"]},
    {"model_type": "solar_open", **LLAMA, **SPARSE, "head_dim": 12, "n_routed_experts": 5, "attention_bias": True},
    {"model_type": "afmoe", **LLAMA, **SPARSE, "head_dim": 12, "num_experts": 5, "num_shared_experts": 3},
    {"model_type": "mimo_v2_flash", **LLAMA, **SPARSE, "num_hidden_layers": 7, "head_dim": 12, "v_head_dim": 10,
     "n_routed_experts": 5},
    {"model_type": "mimo_v2_flash", **LLAMA, **SPARSE, "head_dim": 12, "n_routed_experts": 5, "attention_bias": True,
     "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    {"model_type": "mpt", "vocab_size": 101, "d_model": 48, "n_layers": 3, "n_heads": 6},
    {"model_type": "gpt_oss", **LLAMA, "head_dim": 12, "num_local_experts": 5, "num_experts_per_tok": 2},
    {"model_type": "dots1", **LLAMA, **DEEPSEEK, "attention_bias": True},
    {"model_type": "glm4_moe_lite", **LLAMA, **DEEPSEEK, "mlp_layer_types": ["dense", "sparse", "dense"]},
    {"model_type": "glm4_moe_lite", **LLAMA, **DEEPSEEK},
    {"model_type": "olmoe", **LLAMA, "num_experts": 5, "num_experts_per_tok": 2, "attention_bias": True},
    {"model_type": "minimax_m2", **LLAMA, "head_dim": 12, "num_local_experts": 5, "num_experts_per_tok": 2},
    {"model_type": "granitemoe", **LLAMA, "num_local_experts": 5, "attention_bias": True},
    {"model_type": "ernie4_5_moe", **LLAMA, "moe_num_experts": 5, "moe_k": 2, "moe_intermediate_size": 21,
     "moe_num_shared_experts": 3, "moe_layer_end_index": -1},
    {"model_type": "ernie4_5_moe", **LLAMA, "moe_num_experts": 5, "moe_intermediate_size": 21, "moe_layer_interval": 2},
    {"model_type": "hunyuan_v1_moe", **LLAMA, "head_dim": 12, "num_experts": 5, "moe_topk": [2, 2, 2]},
    {"model_type": "phimoe", **LLAMA, "num_local_experts": 5, "attention_bias": True, "lm_head_bias": True},
    {"model_type": "llama4_text", **LLAMA, "head_dim": 12, "intermediate_size_mlp": 90, "num_local_experts": 5,
     "moe_layers": [0, 2], "attention_bias": True},
    {"model_type": "llama4_text", **LLAMA, "head_dim": 12, "num_local_experts": 5, "interleave_moe_layer_step": 2},
    {"model_type": "nemotron_h", **LLAMA, "hybrid_override_pattern": "MEM*-E", "head_dim": 12, "mamba_num_heads": 4,
     "mamba_head_dim": 8, "n_groups": 2, "ssm_state_size": 5, "n_routed_experts": 5, "moe_latent_size": 16, **SPARSE,
     "moe_shared_expert_intermediate_size": 17},
    {"model_type": "t5", "vocab_size": 101, "d_model": 48, "d_kv": 12, "d_ff": 130, "num_layers": 2,
     "num_decoder_layers": 3, "num_heads": 6},
    {"model_type": "mt5", "vocab_size": 101, "d_model": 48, "d_kv": 12, "d_ff": 130, "num_layers": 2, "num_heads": 6},
]  # fmt: skip


@pytest.mark.parametrize("config", [config for config in TINY if config["model_type"] == "gemma4_text"])
def test_sizes_by_layer_count_as_those_by_kind(config: dict[str, Any]) -> None:
    written = AutoConfig.for_model(**config).to_dict()
    assert "per_layer_config" in written and shape_of_config(written) == shape_of_config(config)


@pytest.mark.parametrize("config", TINY, ids=lambda config: config["model_type"])
def test_every_family_counts_as_transformers_does(config: dict[str, Any]) -> None:
    shape = shape_of_config(config)
    assert shape.parameters == counted(config)
    assert shape.parameters == shape.outside_parameters + sum(map(shape.layer_parameters, range(shape.layers)))


# What has no default, and no model is without.
NO_DEFAULT: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 6},
    "dots1": {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1},
    "hunyuan_v1_moe": {"head_dim": 128},
}


def test_every_family_is_among_them() -> None:
    assert {config["model_type"] for config in TINY} == set(FAMILIES) == set(DEFAULTS)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_defaults_are_those_of_transformers(family: str) -> None:
    few = {"hybrid_override_pattern": "ME*-"} if family == "nemotron_h" else {}
    few |= NO_DEFAULT.get(family, {})
    config = AutoConfig.for_model(family, **few)
    config.allow_global_per_layer_attribute_access = True
    for key, value in DEFAULTS[family].items():
        theirs = [name for name in NAMES.get(key, (key,)) if hasattr(config, name)]
        assert [getattr(config, name) for name in theirs] == [value] * len(theirs), key
        assert theirs or value is False, key  # a switch that this member of the family does not have
    with_defaults = {"model_type": family, **few}
    assert shape_of_config(with_defaults).parameters == counted(with_defaults)


@pytest.mark.parametrize("name", sorted(CATALOGUE))
def test_the_catalogue_counts_as_transformers_does(name: str) -> None:
    """With four layers, and the full number by what one layer more adds: that is linear."""
    config, full = dict(CATALOGUE[name]), shape_named(name)
    key = next((k for k in ("num_hidden_layers", "n_layers", "num_layers") if k in config), "hybrid_override_pattern")
    layers = config[key]
    config[key] = layers[4:8] if isinstance(layers, str) else 4
    if key == "hybrid_override_pattern":
        assert set(config[key]) == set("ME*")
    if "first_k_dense_replace" in config:
        config["first_k_dense_replace"] = min(config["first_k_dense_replace"], 3)
    if config["model_type"] == "gpt_neo":
        config["attention_types"] = [[["global", "local"], 2]]
    if config["model_type"] in {"t5", "mt5"}:  # transformers ties them until it has loaded weights that are not
        config["tie_word_embeddings"] = True
    few = shape_of_config(config)
    assert few.parameters == counted(config)
    if full.layer(0) == full.layer(full.layers - 1):
        assert full.parameters == few.parameters + (full.layers - few.layers) * full.layer_parameters(0)


PUBLISHED = {
    "gpt2": 124_439_808, "gpt2-xl": 1_557_611_200, "bloom-560m": 559_214_592, "bloom-7b1": 7_069_016_064,
    "bloom-176b": 176_247_271_424, "opt-350m": 331_196_416, "gpt-neox-20b": 20_554_567_680,
    "pythia-12b": 11_846_072_320, "llama-7b": 6_738_415_616, "llama-65b": 65_285_660_672,
    "llama2-70b": 68_976_648_192, "llama3-8b": 8_030_261_248, "llama3-70b": 70_553_706_496,
    "llama3.1-405b": 405_853_388_800, "llama3.2-1b": 1_235_814_400, "llama3.2-3b": 3_212_749_824,
    "smollm2-135m": 134_515_008, "mistral-7b": 7_241_732_096, "mixtral-8x7b": 46_702_792_704,
    "qwen2.5-7b": 7_615_616_512, "gemma-2b": 2_506_172_416, "gemma2-9b": 9_241_705_984, "mpt-7b": 6_649_286_656,
    "falcon-7b": 6_921_720_704, "phi-2": 2_779_683_840, "phi3-mini": 3_821_079_552,
}  # fmt: skip
# In total and per token, in units of 10^9, as their reports round them.
PUBLISHED_SPARSE = {
    "deepseek-v3": (671, 37), "deepseek-v2": (236, 21), "kimi-k2": (1026, 32), "qwen3-30b-a3b": (30.5, 3.3),
    "qwen3-235b-a22b": (235, 22), "mixtral-8x7b": (46.7, 12.9), "mixtral-8x22b": (141, 39),
    "gpt-oss-120b": (116.8, 5.7), "nemotron3-nano": (31.6, 3.6), "nemotron3-super": (120.6, 12.7),
    "glm4.5-air": (106, 12),
}  # fmt: skip


def test_published_totals() -> None:
    assert {name: shape_named(name).parameters for name in PUBLISHED} == PUBLISHED


@pytest.mark.parametrize(("name", "totals"), PUBLISHED_SPARSE.items())
def test_published_totals_of_mixtures(name: str, totals: tuple[float, float]) -> None:
    shape = shape_named(name)
    assert shape.parameters == pytest.approx(totals[0] * 1e9, rel=0.01)
    assert shape.active_parameters <= totals[1] * 1e9 * 1.12  # some reports leave the embedding out
    assert shape.active_parameters >= totals[1] * 1e9 * 0.98


def test_adapters_of_latent_attention_count_as_peft_does() -> None:
    from peft import LoraConfig, get_peft_model

    config = next(config for config in TINY if config["model_type"] == "deepseek_v3")
    modules = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
    model = get_peft_model(on_meta(config), LoraConfig(r=3, target_modules=modules, task_type="CAUSAL_LM"))
    adapters = sum(p.numel() for name, p in model.named_parameters() if "lora_" in name)
    ours = ("query down", "query up", "key-value down", "key-value up", "attention output")
    assert lora_parameters(shape_of_config(config), 3, targets=ours) == adapters


def test_adapters_of_chosen_products() -> None:
    """Hu et al., 2021, table 2: rank 8 on queries and values of GPT-3 is 37.7 million; here keys are adapted too."""
    shape = replace(shape_named("gpt3-175b"), fused_qkv=False)
    assert lora_parameters(shape, 8, targets=("qkv",)) == 37_748_736 * 3 // 2


COUNTED_FLOP = ("gpt2", "bloom", "opt", "gptj", "llama", "qwen2", "gemma", "phi3", "cohere", "falcon", "mpt")


@pytest.mark.parametrize("family", COUNTED_FLOP)
def test_forward_flop_are_those_that_torch_counts(family: str) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    config = next(config for config in TINY if config["model_type"] == family)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), attn_implementation="eager")
    tokens, seq_len = 2 * 16, 16
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.zeros(2, seq_len, dtype=torch.long), use_cache=False)
    ours = forward_flop_per_token(shape_of_config(config), seq_len=seq_len, causal=False) * tokens
    assert counter.get_total_flops() == pytest.approx(ours, rel=0.01)  # positions are products as well


def test_flop_of_the_delta_rule_are_those_that_torch_counts() -> None:
    """Without those of triangular systems, which torch does not count."""
    from torch.utils.flop_counter import FlopCounterMode
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule as rule

    net, tokens = DeltaNet(key_heads=3, value_heads=3, key_size=8, value_size=10, kernel=4), 2 * RULE_CHUNK
    keys, values, decays = (torch.zeros(1, tokens, 3, *size) for size in ((8,), (10,), ()))
    with FlopCounterMode(display=False) as counter:
        rule(keys, keys, values, g=decays, beta=decays)
    solved = 3 * RULE_CHUNK * (8 + 10)
    assert counter.get_total_flops() == tokens * (net.forward_flop - solved)


@pytest.mark.parametrize("window", [0, 1, 3, 7, 20])
def test_attended_tokens_are_those_of_the_mask(window: int) -> None:
    seq_len = 7
    mask = [[k <= q and (not window or q - k < window) for k in range(seq_len)] for q in range(seq_len)]
    assert attended_tokens(seq_len, causal=True, window=window) == pytest.approx(sum(map(sum, mask)) / seq_len)


def test_forward_flop_of_gpt3() -> None:
    """Narayanan et al., 2021, equation 3, without the forward pass that is computed twice."""
    shape, seq_len = shape_named("gpt3-175b"), 2048
    h, layers, vocabulary = shape.width, shape.layers, shape.vocabulary
    closed = 72 * layers * h**2 * (1 + seq_len / (6 * h) + vocabulary / (12 * layers * h))
    assert 3 * forward_flop_per_token(shape, seq_len=seq_len, causal=False) == pytest.approx(closed, rel=1e-12)


def test_windows_of_layers() -> None:
    windows = [shape_named("gemma2-2b").layer(i).window for i in range(4)]
    assert windows == [4096, 0, 4096, 0]
    assert [i for i in range(26) if shape_named("gemma3-1b").layer(i).window == 0] == [5, 11, 17, 23]
    assert {shape_named("mistral-7b").layer(i).window for i in range(32)} == {4096}
    assert [shape_named("gpt-neo-1.3b").layer(i).window for i in range(4)] == [0, 256, 0, 256]


def test_layers_with_linear_attention() -> None:
    config = next(config for config in TINY if config["model_type"] == "qwen3_next")
    shape = shape_of_config({**config, "num_hidden_layers": 8})
    assert [shape.layer(i).linear for i in range(8)] == [True, True, True, False] * 2
    assert [shape.layer(i).feed_forward for i in range(3)] == ["experts", "dense", "experts"]
    assert shape.layer_parameters(0) != shape.layer_parameters(3)


def test_a_truncated_mixture_keeps_a_dense_layer() -> None:
    shape = shape_named("DeepSeekV3 truncated to 4 layers")
    assert [shape.layer(i).feed_forward for i in range(4)] == ["dense", "experts", "experts", "experts"]


def test_a_family_that_only_transformers_knows() -> None:
    config = {"model_type": "stablelm", **LLAMA, "use_qkv_bias": True}
    shape = shape_of_config(config)
    assert shape.parameters == counted(config)
    assert (shape.layers, shape.width, shape.kv_heads) == (3, 48, 2)


def test_a_kernel_that_a_configuration_names_is_not_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []
    monkeypatch.setattr(
        "transformers.modeling_utils.lazy_import_flash_attention", lambda name, **_: loaded.append(name)
    )
    config = {"model_type": "stablelm", **LLAMA}
    assert shape_of_config(config | {"attn_implementation": "somebody/kernel"}) == shape_of_config(config)
    assert not loaded


def test_a_shape_is_plain_numbers() -> None:
    """The closed form of GPT: 12 L h^2 (1 + 13 / (12 h) + (V + s) / (12 L h)) (Narayanan et al., 2021, equation 2)."""
    shape = Shape(
        **{"name": "gpt", "layers": 24, "width": 2304, "heads": 24, "kv_heads": 24, "head_size": 96},
        **{"mlp_width": 9216, "vocabulary": 51200, "positions": 2048},
        **{"norm_bias": True, "qkv_bias": True, "output_bias": True, "mlp_bias": True},
    )
    h, layers = 2304, 24
    closed = 12 * layers * h**2 + 13 * layers * h + (51200 + 2048) * h
    assert shape.parameters == closed + 2 * h  # and the norm behind the last layer
