"""The configuration of ChatGLM2, ChatGLM3 and GLM-4 in their first format, as transformers' Glm has it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stoker.errors import Problem, UserError

BASE = 10_000  # of the rotations, times `rope_ratio`
# Keys with the only values that Glm has.
FIXED: dict[str, Any] = {
    "rmsnorm": True,
    "post_layer_norm": True,
    "original_rope": True,
    "apply_residual_connection_post_layernorm": False,
    "add_bias_linear": False,
    "fp32_residual_connection": False,
    "hidden_dropout": 0.0,
    "pre_seq_len": None,
}


def is_config_of_chatglm(config: Mapping[str, Any]) -> bool:
    """Returns whether a ``config.json`` is of this format."""
    return config.get("model_type") == "chatglm"


def glm_config(config: Mapping[str, Any], file: str) -> dict[str, Any]:
    """Returns the keys of a ``config.json`` of this format as transformers' Glm has them.

    Args:
        file: the file that they come from, for messages.

    Raises:
        UserError: Glm cannot compute this model.
    """
    check_chatglm(config, file)
    heads = config["num_attention_heads"]
    return {
        "model_type": "glm",
        "vocab_size": config["padded_vocab_size"],
        "hidden_size": config["hidden_size"],
        "intermediate_size": config["ffn_hidden_size"],
        "num_hidden_layers": config["num_layers"],
        "num_attention_heads": heads,
        "num_key_value_heads": config["multi_query_group_num"] if config.get("multi_query_attention") else heads,
        "head_dim": config["kv_channels"],
        "attention_dropout": config.get("attention_dropout", 0.0),
        "attention_bias": config.get("add_qkv_bias", False),
        "max_position_embeddings": config["seq_length"],
        "rms_norm_eps": config["layernorm_epsilon"],
        "eos_token_id": config.get("eos_token_id"),
        "pad_token_id": config.get("pad_token_id"),
        "tie_word_embeddings": config.get("tie_word_embeddings", False),
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": float(BASE * config.get("rope_ratio", 1)),
            "partial_rotary_factor": 0.5,
        },
        "dtype": config.get("torch_dtype", "float16"),
    }


def check_chatglm(config: Mapping[str, Any], file: str) -> None:
    """Checks that Glm can compute the model of a configuration.

    Raises:
        UserError: it cannot.
    """

    def refuse(message: str, hint: str = "") -> UserError:
        return UserError(Problem(message, hint, file=file))

    if config.get("position_encoding_2d") or "ffn_hidden_size" not in config:
        what = "the first ChatGLM-6B is not supported: attention of its prompts also sees the later tokens"
        raise refuse(what, "use ChatGLM2-6B or a later one")
    if config.get("vision_config"):
        raise refuse("GLM-4V in this format is not supported", "use a checkpoint in transformers' own format")
    if config.get("quantization_bit"):
        raise refuse("the weights are stored quantised", "name the model that it was made from")
    needed = ("padded_vocab_size", "hidden_size", "num_layers", "num_attention_heads", "kv_channels", "seq_length")
    for key in (*needed, "layernorm_epsilon"):
        if not isinstance(config.get(key), int | float):
            raise refuse(f"`{key}` is missing", "copy the file again")
    for key, value in FIXED.items():
        if config.get(key, value) != value:
            raise refuse(f"`{key}` is {config[key]!r}, and only {value!r} is supported")
    if config.get("rope_ratio", 1) != 1 and "chatglm2" in str(config.get("_name_or_path")).lower():
        raise refuse("ChatGLM2-6B-32K is not supported: it divides its positions", "use ChatGLM3-6B-32K")
