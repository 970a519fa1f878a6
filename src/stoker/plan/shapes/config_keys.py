"""Reads the keys of a configuration under any of their names, with the family's default for a missing one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stoker.errors import Problem, UserError

# The families' names of the same number.
NAMES = {
    "hidden_size": ("hidden_size", "n_embd", "n_embed", "d_model"),
    "num_hidden_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "num_key_value_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv"),
    "head_dim": ("head_dim", "d_kv"),
    "intermediate_size": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "d_ff"),
    "max_position_embeddings": ("max_position_embeddings", "n_positions", "max_seq_len"),
    "num_experts": ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    "num_experts_per_tok": ("num_experts_per_tok", "moe_k", "moe_topk"),
    "first_k_dense_replace": ("first_k_dense_replace", "num_dense_layers"),
    "sliding_window_pattern": ("sliding_window_pattern", "global_attn_every_n_layers"),
    "n_shared_experts": ("n_shared_experts", "moe_num_shared_experts", "num_shared_experts"),
}


def _keys(**values: Any) -> dict[str, Any]:
    return values


DELTA_NET = _keys(linear_conv_kernel_dim=4, linear_key_head_dim=128, linear_value_head_dim=128, linear_num_key_heads=16,
    linear_num_value_heads=32)  # fmt: skip

# The defaults of each family's code. Values that it computes from others are left out, and so are false and zero.
# Source: the configuration classes of transformers 5; a test compares.
DEFAULTS: dict[str, dict[str, Any]] = {
    "gpt2": _keys(vocab_size=50257, max_position_embeddings=1024, hidden_size=768, num_hidden_layers=12,
        num_attention_heads=12, tie_word_embeddings=True, resid_pdrop=0.1),
    "bloom": _keys(vocab_size=250880, hidden_size=64, num_hidden_layers=2, num_attention_heads=8,
        tie_word_embeddings=True),
    "opt": _keys(vocab_size=50272, hidden_size=768, num_hidden_layers=12, intermediate_size=3072,
        max_position_embeddings=2048, num_attention_heads=12, do_layer_norm_before=True, enable_bias=True,
        layer_norm_elementwise_affine=True, tie_word_embeddings=True, dropout=0.1),
    "gpt_neo": _keys(vocab_size=50257, max_position_embeddings=2048, hidden_size=2048, num_hidden_layers=24,
        num_attention_heads=16, window_size=256, attention_types=[[["global", "local"], 12]], tie_word_embeddings=True),
    "gptj": _keys(vocab_size=50400, hidden_size=4096, num_hidden_layers=28, num_attention_heads=16),
    "gpt_neox": _keys(vocab_size=50432, hidden_size=6144, num_hidden_layers=44, num_attention_heads=64,
        intermediate_size=24576, use_parallel_residual=True, attention_bias=True),
    "llama": _keys(vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32,
        num_attention_heads=32),
    "mistral": _keys(vocab_size=32000, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=8, sliding_window=4096),
    "mixtral": _keys(vocab_size=32000, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=8, num_experts=8, num_experts_per_tok=2),
    "qwen2": _keys(vocab_size=151936, hidden_size=4096, intermediate_size=22016, num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=32, use_sliding_window=False, max_window_layers=28),
    "qwen2_moe": _keys(vocab_size=151936, hidden_size=2048, intermediate_size=5632, num_hidden_layers=24,
        num_attention_heads=16, num_key_value_heads=16, use_sliding_window=False, max_window_layers=28,
        decoder_sparse_step=1, moe_intermediate_size=1408, shared_expert_intermediate_size=5632, num_experts_per_tok=4,
        num_experts=60, qkv_bias=True),
    "qwen3": _keys(vocab_size=151936, hidden_size=4096, intermediate_size=22016, num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=32, head_dim=128, use_sliding_window=False, max_window_layers=28),
    "qwen3_moe": _keys(vocab_size=151936, hidden_size=2048, intermediate_size=6144, num_hidden_layers=24,
        num_attention_heads=32, num_key_value_heads=4, use_sliding_window=False, decoder_sparse_step=1,
        moe_intermediate_size=768, num_experts_per_tok=8, num_experts=128),
    "qwen3_next": _keys(vocab_size=151936, hidden_size=2048, intermediate_size=5632, num_hidden_layers=48,
        num_attention_heads=16, num_key_value_heads=2, head_dim=256, decoder_sparse_step=1, moe_intermediate_size=512,
        shared_expert_intermediate_size=512, num_experts_per_tok=10, num_experts=512, **DELTA_NET),
    "qwen3_5_text": _keys(vocab_size=248320, hidden_size=4096, intermediate_size=12288, num_hidden_layers=32,
        num_attention_heads=16, num_key_value_heads=4, head_dim=256, **DELTA_NET),
    "qwen3_5_moe_text": _keys(vocab_size=248320, hidden_size=2048, num_hidden_layers=40, num_attention_heads=16,
        num_key_value_heads=2, head_dim=256, moe_intermediate_size=512, shared_expert_intermediate_size=512,
        num_experts_per_tok=8, num_experts=256, **DELTA_NET),
    "glm": _keys(vocab_size=151552, hidden_size=4096, intermediate_size=13696, num_hidden_layers=40,
        num_attention_heads=32, num_key_value_heads=2, head_dim=128, attention_bias=True),
    "gemma": _keys(vocab_size=256000, hidden_size=3072, intermediate_size=24576, num_hidden_layers=28,
        num_attention_heads=16, num_key_value_heads=16, head_dim=256, tie_word_embeddings=True),
    "gemma2": _keys(vocab_size=256000, hidden_size=2304, intermediate_size=9216, num_hidden_layers=26,
        num_attention_heads=8, num_key_value_heads=4, head_dim=256, sliding_window=4096, tie_word_embeddings=True),
    "gemma3_text": _keys(vocab_size=262208, hidden_size=2304, intermediate_size=9216, num_hidden_layers=26,
        num_attention_heads=8, num_key_value_heads=4, head_dim=256, sliding_window=4096, tie_word_embeddings=True),
    "gemma4_text": _keys(vocab_size=262144, hidden_size=2304, intermediate_size=9216, num_hidden_layers=30,
        num_attention_heads=8, num_key_value_heads=4, head_dim=256, sliding_window=512, tie_word_embeddings=True,
        vocab_size_per_layer_input=262144, hidden_size_per_layer_input=256),
    "phi": _keys(vocab_size=51200, hidden_size=2048, intermediate_size=8192, num_hidden_layers=24,
        num_attention_heads=32),
    "phi3": _keys(vocab_size=32064, hidden_size=3072, intermediate_size=8192, num_hidden_layers=32,
        num_attention_heads=32),
    "cohere": _keys(vocab_size=256000, hidden_size=8192, intermediate_size=22528, num_hidden_layers=40,
        num_attention_heads=64, tie_word_embeddings=True),
    "falcon": _keys(vocab_size=65024, hidden_size=4544, num_hidden_layers=32, num_attention_heads=71, multi_query=True,
        parallel_attn=True, tie_word_embeddings=True),
    "olmo2": _keys(vocab_size=50304, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32,
        num_attention_heads=32),
    "deepseek_v2": _keys(vocab_size=102400, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32,
        num_attention_heads=32, kv_lora_rank=512, q_lora_rank=1536, num_experts=64, n_shared_experts=2,
        qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, moe_intermediate_size=1407),
    "deepseek_v3": _keys(vocab_size=129280, hidden_size=7168, intermediate_size=18432, num_hidden_layers=61,
        num_attention_heads=128, first_k_dense_replace=3, kv_lora_rank=512, q_lora_rank=1536, num_experts=256,
        n_shared_experts=1, num_experts_per_tok=8, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
        moe_intermediate_size=2048),
    "deepseek_v32": _keys(vocab_size=129280, hidden_size=7168, intermediate_size=18432, num_hidden_layers=61,
        num_attention_heads=128, first_k_dense_replace=3, kv_lora_rank=512, q_lora_rank=1536, num_experts=256,
        n_shared_experts=1, num_experts_per_tok=8, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
        moe_intermediate_size=2048, index_n_heads=64, index_head_dim=128, index_topk=2048),
    "glm_moe_dsa": _keys(vocab_size=154880, hidden_size=6144, intermediate_size=12288, num_hidden_layers=78,
        num_attention_heads=64, first_k_dense_replace=3, kv_lora_rank=512, q_lora_rank=2048, num_experts=256,
        n_shared_experts=1, num_experts_per_tok=8, qk_nope_head_dim=192, qk_rope_head_dim=64, v_head_dim=256,
        moe_intermediate_size=2048, index_n_heads=32, index_head_dim=128, index_topk=2048),
    "mpt": _keys(vocab_size=50368, hidden_size=2048, num_hidden_layers=24, num_attention_heads=16,
        tie_word_embeddings=True),
    "gpt_oss": _keys(vocab_size=201088, hidden_size=2880, intermediate_size=2880, num_hidden_layers=36,
        num_attention_heads=64, num_key_value_heads=8, head_dim=64, num_experts=128, num_experts_per_tok=4,
        sliding_window=128, attention_bias=True),
    "smollm3": _keys(vocab_size=128256, hidden_size=2048, intermediate_size=11008, num_hidden_layers=36,
        num_attention_heads=16, num_key_value_heads=4, tie_word_embeddings=True),
    "starcoder2": _keys(vocab_size=49152, hidden_size=3072, intermediate_size=12288, num_hidden_layers=30,
        num_attention_heads=24, num_key_value_heads=2, use_bias=True, tie_word_embeddings=True),
    "glm4_moe": _keys(vocab_size=151552, hidden_size=4096, intermediate_size=10944, num_hidden_layers=46,
        num_attention_heads=96, num_key_value_heads=8, moe_intermediate_size=1408, num_experts_per_tok=8,
        num_experts=128, n_shared_experts=1, first_k_dense_replace=1),
    "dots1": _keys(vocab_size=152064, hidden_size=4608, intermediate_size=10944, num_hidden_layers=62,
        num_attention_heads=32, num_key_value_heads=32, moe_intermediate_size=1408, sliding_window=4096,
        max_window_layers=62),
    "exaone_moe": _keys(vocab_size=102400, hidden_size=4096, intermediate_size=16384, num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=32, moe_intermediate_size=1024, num_experts_per_tok=8,
        num_experts=64, n_shared_experts=1, first_k_dense_replace=1, sliding_window=4096),
    "solar_open": _keys(vocab_size=196608, hidden_size=4096, num_hidden_layers=48, num_attention_heads=64,
        num_key_value_heads=8, head_dim=128, moe_intermediate_size=1280, num_experts_per_tok=8, num_experts=128,
        n_shared_experts=1),
    "afmoe": _keys(vocab_size=200192, hidden_size=2048, intermediate_size=6144, num_hidden_layers=32,
        num_attention_heads=16, head_dim=128, moe_intermediate_size=1408, num_experts_per_tok=6, num_experts=64,
        n_shared_experts=2, first_k_dense_replace=1, sliding_window=1024),
    "mimo_v2_flash": _keys(vocab_size=152576, hidden_size=4096, intermediate_size=16384, num_hidden_layers=48,
        num_attention_heads=64, num_key_value_heads=4, head_dim=192, v_head_dim=128, moe_intermediate_size=2048,
        num_experts_per_tok=8, num_experts=256, sliding_window=129),
    "glm4_moe_lite": _keys(vocab_size=154880, hidden_size=2048, intermediate_size=10240, num_hidden_layers=47,
        num_attention_heads=20, kv_lora_rank=512, q_lora_rank=768, num_experts=64, n_shared_experts=1,
        num_experts_per_tok=4, qk_nope_head_dim=192, qk_rope_head_dim=64, v_head_dim=256, moe_intermediate_size=1536),
    "olmoe": _keys(vocab_size=50304, hidden_size=2048, intermediate_size=2048, num_hidden_layers=16,
        num_attention_heads=16, num_experts=64, num_experts_per_tok=8),
    "granitemoe": _keys(vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32,
        num_attention_heads=32, num_experts=8, num_experts_per_tok=2),
    "ernie4_5_moe": _keys(vocab_size=103424, hidden_size=2560, intermediate_size=12288, num_hidden_layers=28,
        num_attention_heads=20, num_key_value_heads=4, num_experts=64, n_shared_experts=2, num_experts_per_tok=6,
        moe_intermediate_size=1536, moe_layer_start_index=1, moe_layer_end_index=27, moe_layer_interval=1,
        tie_word_embeddings=True),
    "minimax_m2": _keys(vocab_size=200064, hidden_size=3072, intermediate_size=1536, num_hidden_layers=62,
        num_attention_heads=48, num_key_value_heads=8, head_dim=128, num_experts=256, num_experts_per_tok=8),
    "hunyuan_v1_moe": _keys(vocab_size=290943, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32,
        num_attention_heads=32, num_experts=1, num_experts_per_tok=1),
    "phimoe": _keys(vocab_size=32064, hidden_size=4096, intermediate_size=6400, num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=8, num_experts=16, num_experts_per_tok=2),
    "llama4_text": _keys(vocab_size=202048, hidden_size=5120, intermediate_size=8192, intermediate_size_mlp=16384,
        num_hidden_layers=48, num_attention_heads=40, num_key_value_heads=8, head_dim=128, num_experts=16,
        num_experts_per_tok=1, interleave_moe_layer_step=1, no_rope_layer_interval=4, attention_chunk_size=8192),
    "nemotron_h": _keys(vocab_size=131072, hidden_size=4096, num_attention_heads=32, num_key_value_heads=8,
        head_dim=128, intermediate_size=21504, ssm_state_size=128, mamba_num_heads=128, mamba_head_dim=64, n_groups=8,
        conv_kernel=4, num_experts=8, num_experts_per_tok=2, n_shared_experts=1, moe_intermediate_size=7688,
        moe_shared_expert_intermediate_size=7688),
    "t5": _keys(vocab_size=32128, hidden_size=512, head_dim=64, intermediate_size=2048, num_hidden_layers=6,
        num_attention_heads=8, relative_attention_num_buckets=32, feed_forward_proj="relu", tie_word_embeddings=True,
        dropout_rate=0.1),
    "mt5": _keys(vocab_size=250112, hidden_size=512, head_dim=64, intermediate_size=1024, num_hidden_layers=8,
        num_attention_heads=6, relative_attention_num_buckets=32, feed_forward_proj="gated-gelu",
        tie_word_embeddings=True, dropout_rate=0.1),
}  # fmt: skip
DEFAULTS["glm4"] = DEFAULTS["glm"]
DEFAULTS["granite"] = DEFAULTS["llama"]
DEFAULTS["cohere2"] = {**DEFAULTS["cohere"], "head_dim": 128, "sliding_window": 4096}


class Settings:
    """Typed access to the keys of a configuration.

    Args:
        config: as in ``config.json``.
        family: whose defaults apply.
        place: the file it comes from, for messages.
    """

    def __init__(self, config: Mapping[str, Any], *, family: str, place: str = "") -> None:
        self.config, self.family, self.place = config, family, place

    def value(self, key: str) -> Any:
        """Returns the first that is not null under the key's names, or the family's default, or None."""
        for name in NAMES.get(key, (key,)):
            if self.config.get(name) is not None:
                return self.config[name]
        if any(name in self.config for name in NAMES.get(key, (key,))):
            return None
        return DEFAULTS[self.family].get(key)

    def integer(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        """Returns a whole number.

        Raises:
            UserError: it is missing without a default, or no whole number of at least ``least``.
        """
        value = self.value(key)
        if value is None and default is not None:
            return default
        if value is None:
            raise UserError(Problem(f"the configuration ({self.family}) has no `{key}`", file=self.place))
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            text = f"`{key}` of the configuration ({self.family}) is {value!r}"
            raise UserError(Problem(text, f"write a whole number of at least {least}", file=self.place))
        return value

    def flag(self, key: str) -> bool:
        """Returns whether a key is true; False if it is missing."""
        return bool(self.value(key))

    def integers(self, key: str) -> list[int]:
        """Returns a list of whole numbers; empty if it is missing.

        Raises:
            UserError: it has another type.
        """
        value = self.value(key)
        if value is None:
            return []
        if not isinstance(value, list) or any(type(number) is not int for number in value):
            text = f"`{key}` of the configuration ({self.family}) is {value!r}"
            raise UserError(Problem(text, "write a list of whole numbers", file=self.place))
        return value

    def words(self, key: str) -> list[str]:
        """Returns a list of strings, such as a kind for each layer, as transformers reads it; empty if it is missing.

        A single string gives its letters; ``[[words, times], ...]`` repeats the strings.

        Raises:
            UserError: it has another type.
        """
        value = self.value(key)
        words: list[str] = []
        for entry in value if isinstance(value, (list, tuple, str)) else [value] if value is not None else []:
            match entry:
                case str():
                    words.append(entry)
                case [list() as group, int() as times] if all(isinstance(word, str) for word in group):
                    words += group * times
                case _:
                    text = f"`{key}` of the configuration ({self.family}) is {value!r}"
                    raise UserError(Problem(text, "write a list of words", file=self.place))
        return words
