"""Well-known models by name, each as the keys of its configuration that differ from its family's defaults.

Sources: the models' published configurations; for GPT-3 and its kind Brown et al., 2020, table 2.1, Smith et al., 2022
(MT-NLG), section 2.1, Narayanan et al., 2021, table 1, and Korthikanti et al., 2022, table 3.
"""

from __future__ import annotations

from typing import Any

Config = dict[str, Any]


def _config(family: str, layers: int, width: int, heads: int, **more: Any) -> Config:
    sizes = {"num_hidden_layers": layers, "hidden_size": width, "num_attention_heads": heads}
    return {"model_type": family, **sizes, **more}


def _gpt(layers: int, width: int, heads: int, *, vocabulary: int = 51200, positions: int = 2048) -> Config:
    return _config("gpt2", layers, width, heads, vocab_size=vocabulary, n_positions=positions)


def _gated(
    family: str, layers: int, width: int, heads: int, kv_heads: int, mlp_width: int, vocabulary: int, **more: Any
) -> Config:
    more = {"num_key_value_heads": kv_heads, "intermediate_size": mlp_width, "vocab_size": vocabulary, **more}
    return _config(family, layers, width, heads, **more)


def _llama(*sizes: int, **more: Any) -> Config:
    return _gated("llama", *sizes, **more)


def _qwen2(*sizes: int, tied: bool = False) -> Config:
    return _gated("qwen2", *sizes, tie_word_embeddings=tied)


def _qwen3(*sizes: int, tied: bool = False, **more: Any) -> Config:
    return _gated("qwen3", *(*sizes, 151936), head_dim=128, tie_word_embeddings=tied, **more)


def _neox(layers: int, width: int, heads: int, vocabulary: int) -> Config:
    return _config("gpt_neox", layers, width, heads, intermediate_size=4 * width, vocab_size=vocabulary)


def _opt(layers: int, width: int, heads: int, **more: Any) -> Config:
    return _config("opt", layers, width, heads, ffn_dim=4 * width, **{"word_embed_proj_dim": width, **more})


def _mpt(layers: int, width: int, heads: int) -> Config:
    return {"model_type": "mpt", "n_layers": layers, "d_model": width, "n_heads": heads, "vocab_size": 50432}


def _deepseek(family: str, layers: int, width: int, heads: int, mlp_width: int, vocabulary: int, **more: Any) -> Config:
    return _config(family, layers, width, heads, intermediate_size=mlp_width, vocab_size=vocabulary, **more)


def _t5(family: str, layers: int, width: int, heads: int, mlp_width: int, vocabulary: int) -> Config:
    sizes = {"num_layers": layers, "d_model": width, "num_heads": heads, "d_ff": mlp_width, "vocab_size": vocabulary}
    return {"model_type": family, **sizes, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}


def _experts(count: int, per_token: int, width: int, shared: int = 0) -> Config:
    sizes = {"n_routed_experts": count, "num_experts_per_tok": per_token, "moe_intermediate_size": width}
    return {**sizes, "n_shared_experts": shared}


def _nemotron(layers: str, width: int, heads: int, mamba_heads: int, experts: Config, shared_width: int) -> Config:
    mixer = {"mamba_num_heads": mamba_heads, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8}
    sizes = {"hidden_size": width, "num_attention_heads": heads, "num_key_value_heads": 2, "head_dim": 128}
    shared = {"n_shared_experts": 1, "moe_shared_expert_intermediate_size": shared_width}
    return {"model_type": "nemotron_h", "hybrid_override_pattern": layers, **sizes, **mixer, **experts, **shared}


# M a Mamba-2 mixer, E a mixture, * attention.
NANO_LAYERS = "MEMEM*E" + "MEMEM*E" * 4 + "MEMEMEM*E" + "MEMEMEME"
SUPER_LAYERS = "MEMEMEM*E" * 3 + "MEMEMEMEM*E" * 4 + "MEMEMEM*E" + "MEMEMEME"
ULTRA_LAYERS = "MEMEMEM*E" * 12

GPTS: dict[str, Config] = {
    "gpt2": _gpt(12, 768, 12, vocabulary=50257, positions=1024),
    "gpt2-medium": _gpt(24, 1024, 16, vocabulary=50257, positions=1024),
    "gpt2-large": _gpt(36, 1280, 20, vocabulary=50257, positions=1024),
    "gpt2-xl": _gpt(48, 1600, 25, vocabulary=50257, positions=1024),
    "gpt-1.7b": _gpt(24, 2304, 24),
    "gpt-3.6b": _gpt(30, 3072, 32),
    "gpt-7.5b": _gpt(36, 4096, 32),
    "gpt-18.4b": _gpt(40, 6144, 48),
    "gpt-22b": _gpt(48, 6144, 64),
    "gpt-39.1b": _gpt(48, 8192, 64),
    "gpt-76.1b": _gpt(60, 10240, 80),
    "gpt-145.6b": _gpt(80, 12288, 96),
    "gpt-310.1b": _gpt(96, 16384, 128),
    "gpt3-5b": _gpt(24, 4096, 32),
    "gpt3-20b": _gpt(44, 6144, 48),
    "gpt3-175b": _gpt(96, 12288, 96),
    "mt-nlg-530b": _gpt(105, 20480, 128),
    "gpt-529.6b": _gpt(105, 20480, 128),
    "gpt-1t": _gpt(128, 25600, 160),
    "gpt-1008.0b": _gpt(128, 25600, 160),
    "bloom-560m": _config("bloom", 24, 1024, 16),
    "bloom-1b1": _config("bloom", 24, 1536, 16),
    "bloom-1b7": _config("bloom", 24, 2048, 16),
    "bloom-3b": _config("bloom", 30, 2560, 32),
    "bloom-7b1": _config("bloom", 30, 4096, 32),
    "bloom-176b": _config("bloom", 70, 14336, 112),
    "opt-125m": _opt(12, 768, 12),
    "opt-350m": _opt(24, 1024, 16, word_embed_proj_dim=512, do_layer_norm_before=False),
    "opt-1.3b": _opt(24, 2048, 32),
    "opt-2.7b": _opt(32, 2560, 32),
    "opt-6.7b": _opt(32, 4096, 32),
    "opt-13b": _opt(40, 5120, 40),
    "opt-30b": _opt(48, 7168, 56),
    "opt-66b": _opt(64, 9216, 72),
    "opt-175b": _opt(96, 12288, 96),
    "gpt-neo-125m": _config("gpt_neo", 12, 768, 12),
    "gpt-neo-1.3b": _config("gpt_neo", 24, 2048, 16),
    "gpt-neo-2.7b": _config("gpt_neo", 32, 2560, 20),
    "gpt-j-6b": _config("gptj", 28, 4096, 16),
    "gpt-neox-20b": _neox(44, 6144, 64, 50432),
    "pythia-70m": _neox(6, 512, 8, 50304),
    "pythia-160m": _neox(12, 768, 12, 50304),
    "pythia-410m": _neox(24, 1024, 16, 50304),
    "pythia-1b": _neox(16, 2048, 8, 50304),
    "pythia-1.4b": _neox(24, 2048, 16, 50304),
    "pythia-2.8b": _neox(32, 2560, 32, 50304),
    "pythia-6.9b": _neox(32, 4096, 32, 50432),
    "pythia-12b": _neox(36, 5120, 40, 50688),
    "falcon-7b": _config("falcon", 32, 4544, 71, vocab_size=65024),
    "falcon-40b": _config("falcon", 60, 8192, 128, num_kv_heads=8, new_decoder_architecture=True, vocab_size=65024),
    "falcon-180b": _config("falcon", 80, 14848, 232, num_kv_heads=8, new_decoder_architecture=True, vocab_size=65024),
    "mpt-125m": _mpt(12, 768, 12),
    "mpt-350m": _mpt(24, 1024, 16),
    "mpt-760m": _mpt(24, 1536, 12),
    "mpt-1b": _mpt(24, 2048, 16),
    "mpt-3b": _mpt(32, 2560, 20),
    "mpt-7b": _mpt(32, 4096, 32),
    "mpt-13b": _mpt(40, 5120, 40),
    "mpt-30b": _mpt(48, 7168, 64),
    "mpt-70b": _mpt(80, 8192, 64),
    "phi-2": _config("phi", 32, 2560, 32, intermediate_size=10240),
    "starcoder2-3b": _config("starcoder2", 30, 3072, 24, intermediate_size=12288, num_key_value_heads=2),
    "starcoder2-7b": _config("starcoder2", 32, 4608, 36, intermediate_size=18432, num_key_value_heads=4),
    "starcoder2-15b": _config("starcoder2", 40, 6144, 48, intermediate_size=24576, num_key_value_heads=4),
    "t0-3b": _t5("t5", 24, 2048, 32, 5120, 32128),
    "t0-11b": _t5("t5", 24, 4096, 64, 10240, 32128),
    "mt5-xl": _t5("mt5", 24, 2048, 32, 5120, 250112),
    "mt5-xxl": _t5("mt5", 24, 4096, 64, 10240, 250112),
}

DENSE: dict[str, Config] = {
    "llama-7b": _llama(32, 4096, 32, 32, 11008, 32000),
    "llama-13b": _llama(40, 5120, 40, 40, 13824, 32000),
    "llama-33b": _llama(60, 6656, 52, 52, 17920, 32000),
    "llama-65b": _llama(80, 8192, 64, 64, 22016, 32000),
    "llama2-7b": _llama(32, 4096, 32, 32, 11008, 32000),
    "llama2-13b": _llama(40, 5120, 40, 40, 13824, 32000),
    "llama2-34b": _llama(48, 8192, 64, 8, 22016, 32000),
    "llama2-70b": _llama(80, 8192, 64, 8, 28672, 32000),
    "llama3-8b": _llama(32, 4096, 32, 8, 14336, 128256),
    "llama3-70b": _llama(80, 8192, 64, 8, 28672, 128256),
    "llama3.1-405b": _llama(126, 16384, 128, 8, 53248, 128256),
    "llama3.2-1b": _llama(16, 2048, 32, 8, 8192, 128256, head_dim=64, tie_word_embeddings=True),
    "llama3.2-3b": _llama(28, 3072, 24, 8, 8192, 128256, head_dim=128, tie_word_embeddings=True),
    "tinyllama-1.1b": _llama(22, 2048, 32, 4, 5632, 32000),
    "smollm2-135m": _llama(30, 576, 9, 3, 1536, 49152, tie_word_embeddings=True),
    "smollm2-360m": _llama(32, 960, 15, 5, 2560, 49152, tie_word_embeddings=True),
    "smollm2-1.7b": _llama(24, 2048, 32, 32, 8192, 49152, tie_word_embeddings=True),
    "smollm3-3b": _gated("smollm3", 36, 2048, 16, 4, 11008, 128256),
    "internlm-7b": _llama(32, 4096, 32, 32, 11008, 103168, attention_bias=True),
    "internlm-20b": _llama(60, 5120, 40, 40, 13824, 103168),
    "internlm2-7b": _llama(32, 4096, 32, 8, 14336, 92544),
    "yi-6b": _llama(32, 4096, 32, 4, 11008, 64000),
    "yi-34b": _llama(60, 7168, 56, 8, 20480, 64000),
    "mistral-7b": _gated("mistral", 32, 4096, 32, 8, 14336, 32000),
    "mistral-nemo-12b": _gated("mistral", 40, 5120, 32, 8, 14336, 131072, head_dim=128, sliding_window=None),
    "mistral-large-123b": _gated("mistral", 88, 12288, 96, 8, 28672, 32768, sliding_window=None),
    "qwen2-0.5b": _qwen2(24, 896, 14, 2, 4864, 151936, tied=True),
    "qwen2-1.5b": _qwen2(28, 1536, 12, 2, 8960, 151936, tied=True),
    "qwen2-7b": _qwen2(28, 3584, 28, 4, 18944, 152064),
    "qwen2-72b": _qwen2(80, 8192, 64, 8, 29568, 152064),
    "qwen2.5-0.5b": _qwen2(24, 896, 14, 2, 4864, 151936, tied=True),
    "qwen2.5-1.5b": _qwen2(28, 1536, 12, 2, 8960, 151936, tied=True),
    "qwen2.5-3b": _qwen2(36, 2048, 16, 2, 11008, 151936, tied=True),
    "qwen2.5-7b": _qwen2(28, 3584, 28, 4, 18944, 152064),
    "qwen2.5-14b": _qwen2(48, 5120, 40, 8, 13824, 152064),
    "qwen2.5-32b": _qwen2(64, 5120, 40, 8, 27648, 152064),
    "qwen2.5-72b": _qwen2(80, 8192, 64, 8, 29568, 152064),
    "qwen3-0.6b": _qwen3(28, 1024, 16, 8, 3072, tied=True),
    "qwen3-1.7b": _qwen3(28, 2048, 16, 8, 6144, tied=True),
    "qwen3-4b": _qwen3(36, 2560, 32, 8, 9728, tied=True),
    "qwen3-8b": _qwen3(36, 4096, 32, 8, 12288),
    "qwen3-14b": _qwen3(40, 5120, 40, 8, 17408),
    "qwen3-32b": _qwen3(64, 5120, 64, 8, 25600),
    "glm4-9b": _gated("glm", 40, 4096, 32, 2, 13696, 151552),
    "glm4-9b-0414": _gated("glm4", 40, 4096, 32, 2, 13696, 151552),
    "glm4-32b-0414": _gated("glm4", 61, 6144, 48, 2, 23040, 151552, attention_bias=False),
    "gemma-2b": _gated("gemma", 18, 2048, 8, 1, 16384, 256000),
    "gemma-7b": _gated("gemma", 28, 3072, 16, 16, 24576, 256000),
    "gemma2-2b": _gated("gemma2", 26, 2304, 8, 4, 9216, 256000),
    "gemma2-9b": _gated("gemma2", 42, 3584, 16, 8, 14336, 256000),
    "gemma2-27b": _gated("gemma2", 46, 4608, 32, 16, 36864, 256000, head_dim=128),
    "gemma3-1b": _gated("gemma3_text", 26, 1152, 4, 1, 6912, 262144, sliding_window=512),
    "gemma3-4b": _gated("gemma3_text", 34, 2560, 8, 4, 10240, 262208, sliding_window=1024),
    "gemma3-12b": _gated("gemma3_text", 48, 3840, 16, 8, 15360, 262208, sliding_window=1024),
    "gemma3-27b": _gated("gemma3_text", 62, 5376, 32, 16, 21504, 262208, head_dim=128, sliding_window=1024),
    "phi3-mini": _gated("phi3", 32, 3072, 32, 32, 8192, 32064, sliding_window=2047),
    "phi3-medium": _gated("phi3", 40, 5120, 40, 10, 17920, 32064, sliding_window=2047),
    "phi4": _gated("phi3", 40, 5120, 40, 10, 17920, 100352),
    "olmo2-7b": _gated("olmo2", 32, 4096, 32, 32, 11008, 100352),
    "olmo2-13b": _gated("olmo2", 40, 5120, 40, 40, 13824, 100352),
    "olmo2-32b": _gated("olmo2", 64, 5120, 40, 8, 27648, 100352),
    "command-r-35b": _gated("cohere", 40, 8192, 64, 64, 22528, 256000),
    "command-r-plus-104b": _gated("cohere", 64, 12288, 96, 8, 33792, 256000, use_qk_norm=True),
    "granite-8b": _gated("granite", 40, 4096, 32, 8, 12800, 49155, tie_word_embeddings=True),
}

SPARSE: dict[str, Config] = {
    "mixtral-8x7b": _gated("mixtral", 32, 4096, 32, 8, 14336, 32000),
    "mixtral-8x22b": _gated("mixtral", 56, 6144, 48, 8, 16384, 32768),
    "qwen1.5-moe-a2.7b": _gated("qwen2_moe", 24, 2048, 16, 16, 5632, 151936),
    "qwen2-57b-a14b": _gated(
        *("qwen2_moe", 28, 3584, 28, 4, 18944, 151936),
        num_experts=64,
        num_experts_per_tok=8,
        moe_intermediate_size=2560,
        shared_expert_intermediate_size=20480,
    ),
    "qwen3-30b-a3b": _gated("qwen3_moe", 48, 2048, 32, 4, 6144, 151936, head_dim=128, moe_intermediate_size=768),
    "qwen3-235b-a22b": _gated("qwen3_moe", 94, 4096, 64, 4, 12288, 151936, head_dim=128, moe_intermediate_size=1536),
    "qwen3-next-80b-a3b": _gated("qwen3_next", 48, 2048, 16, 2, 5632, 151936),
    "gpt-oss-20b": _config("gpt_oss", 24, 2880, 64, num_local_experts=32),
    "gpt-oss-120b": _config("gpt_oss", 36, 2880, 64, num_local_experts=128),
    "deepseek-v2-lite": _deepseek(
        *("deepseek_v2", 27, 2048, 16, 10944, 102400),
        **{"q_lora_rank": None, "first_k_dense_replace": 1, **_experts(64, 6, 1408, 2)},
    ),
    "deepseek-v2": _deepseek(
        *("deepseek_v2", 60, 5120, 128, 12288, 102400),
        **{"first_k_dense_replace": 1, **_experts(160, 6, 1536, 2)},
    ),
    "deepseek-v3": _deepseek("deepseek_v3", 61, 7168, 128, 18432, 129280, **_experts(256, 8, 2048, 1)),
    "kimi-k2": _deepseek(
        *("deepseek_v3", 61, 7168, 64, 18432, 163840),
        **{"first_k_dense_replace": 1, **_experts(384, 8, 2048, 1)},
    ),
    "glm4.5-air": _gated(
        *("glm4_moe", 46, 4096, 96, 8, 10944, 151552), head_dim=128, attention_bias=True, **_experts(128, 8, 1408, 1)
    ),
    "glm4.5": _gated(
        *("glm4_moe", 92, 5120, 96, 8, 12288, 151552),
        head_dim=128,
        attention_bias=True,
        use_qk_norm=True,
        first_k_dense_replace=3,
        **_experts(160, 8, 1536, 1),
    ),
    "nemotron3-nano": _nemotron(NANO_LAYERS, 2688, 32, 64, _experts(128, 6, 1856), 3712),
    "nemotron3-super": _nemotron(
        SUPER_LAYERS, 4096, 32, 128, {"moe_latent_size": 1024, **_experts(512, 22, 2688)}, 5376
    ),
    # An estimate: twice the widths of Super, with as many layers as give its 550B parameters and 55B active ones.
    "nemotron3-ultra": _nemotron(
        ULTRA_LAYERS, 8192, 64, 256, {"moe_latent_size": 2048, **_experts(512, 22, 5120)}, 10240
    ),
}
CATALOGUE: dict[str, Config] = {**GPTS, **DENSE, **SPARSE}
