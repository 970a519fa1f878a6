"""Derives the shape of a model from its configuration, the content of ``config.json``."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

from stoker.errors import Problem, UserError, reason_of
from stoker.job.keys.suggest_key import nearest
from stoker.plan.shape import Shape
from stoker.plan.shapes.chatglm import glm_config, is_config_of_chatglm
from stoker.plan.shapes.config_keys import Settings
from stoker.plan.shapes.families import FAMILIES

# Models with a separate name whose architecture is that of another family.
SAME_AS = {
    "kimi_k2": "deepseek_v3",
    "internlm2": "llama",
    "internlm": "llama",
    "yi": "llama",
    "baichuan": "llama",
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
}
# Language models that transformers has only inside an image-text model, and the family with the same code. The rotary
# positions of an image have three parts, which are equal in a text. Older configurations have no `text_config`.
TEXT_FAMILIES = {
    "qwen2_vl": "qwen2",
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
    "glm4v_text": "glm4",
}


def shape_of_config(config: Mapping[str, Any], *, name: str = "", place: str = "") -> Shape:
    """Returns the shape that a configuration describes, with its family's defaults for missing keys.

    For a multimodal configuration, only its language model is read. A family that is not known here is
    counted by transformers, without allocating weights, if that is installed.

    Args:
        config: the keys of a ``config.json``.
        name: of the model, else its family's.
        place: the file it comes from, for messages.

    Raises:
        UserError: the family is unknown, or a number is missing or impossible.
    """
    if isinstance(config.get("text_config"), Mapping):
        config = {"model_type": f"{config.get('model_type', '')}_text", **config["text_config"]}
    if is_config_of_chatglm(config):
        config = glm_config(config, place)
    family = config.get("model_type")
    if not isinstance(family, str) or not family:
        raise UserError(Problem("the configuration has no `model_type`", _known(""), file=place))
    if family in TEXT_FAMILIES:
        family = TEXT_FAMILIES[family]
        config = {**config, "model_type": family}
    known = family if family in FAMILIES else SAME_AS.get(family)
    if known is None:
        return _counted_by_transformers(config, name=name or family, place=place)
    shape = FAMILIES[known](Settings(config, family=known, place=place))
    return replace(shape, name=name or family, family=known)


def _known(family: str) -> str:
    near = nearest(family, FAMILIES)
    known = f"known are {', '.join(sorted(FAMILIES))}"
    return f"write `{near}`; {known}" if near else known


def _counted_by_transformers(config: Mapping[str, Any], *, name: str, place: str) -> Shape:
    """Counts a family that only transformers has: the total is exact, its division over operators that of a Llama.

    The difference between the two is spread evenly over the layers.
    """
    family = str(config["model_type"])
    unknown = UserError(Problem(f"unknown family of models `{family}`", _known(family), file=place))
    if find_spec("transformers") is None:
        raise unknown
    torch, transformers = importlib.import_module("torch"), importlib.import_module("transformers")
    if family not in transformers.CONFIG_MAPPING:
        raise unknown
    try:
        read = transformers.AutoConfig.for_model(**config)
        with torch.device("meta"):
            plain = {"attn_implementation": "eager", "experts_implementation": "eager"}  # no kernel that it names
            model = transformers.AutoModelForCausalLM.from_config(read, trust_remote_code=False, **plain)
    except Exception as error:  # for impossible values transformers may raise any exception
        text = f"transformers cannot build a model of family `{family}`: {reason_of(error)}"
        raise UserError(Problem(text, file=place)) from error
    common = {key: getattr(read, key, None) for key in KEYS_OF_A_LLAMA}
    plain = {"model_type": "llama", **{key: value for key, value in common.items() if value is not None}}
    shape = shape_of_config(plain, name=name, place=place)
    total = sum(parameter.numel() for parameter in model.parameters())
    matrices = shape.layers * shape.width * shape.mlp_width  # one of each MLP
    if shape.parameters - total > matrices // 2:  # its MLPs have two matrices, not three
        shape = replace(shape, gated=False)
    missing = total - shape.parameters
    per_layer, rest = divmod(missing, shape.layers)
    return replace(shape, family=family, layer_vectors=per_layer, outside_vectors=rest)


KEYS_OF_A_LLAMA = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("intermediate_size", "vocab_size", "tie_word_embeddings"),
)
