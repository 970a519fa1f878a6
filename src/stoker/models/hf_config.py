"""A model's configuration and generation settings, as transformers reads them.

Of an image-text model, Stoker trains the language model: see `stoker.models.image_text`.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stoker.errors import Problem, UserError, user_file_errors
from stoker.job.blocks.model_block import ModelBlock
from stoker.job.keys.suggest_key import nearest
from stoker.models.model_folder import GENERATION, check_settings, read_config
from stoker.node_cache.hub import require_repository
from stoker.plan.shapes.changed_config import changed_config, changed_rope, kinds_of_rope
from stoker.plan.shapes.shape_of_config import TEXT_FAMILIES

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedConfig

# Families of image-text models whose language model computes the same alone, for text; the tests compare them.
IMAGE_TEXT = (
    *("gemma3", "gemma4", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "mistral3"),
    *("llama4", "glm4v", "internvl", "llava", "llava_next", "llava_onevision", "idefics3", "smolvlm"),
)

ROPE = ("rope_parameters", "rope_scaling")  # the second in checkpoints of transformers 4, which has the base beside it
# Keys that name code or files, or that other keys of a job decide.
FIXED = {"model_type", "architectures", "auto_map", "text_config", "vision_config", "quantization_config", "dtype"}


def config_of(where: str, block: ModelBlock) -> PreTrainedConfig:
    """Returns the configuration at a folder or a hub id; of an image-text model, that of its language model.

    Raises:
        UserError: see `whole_config`.
    """
    return text_config(whole_config(where, block))


def text_config(whole: PreTrainedConfig) -> PreTrainedConfig:
    """Returns the configuration of the language model of an image-text model; any other configuration unchanged."""
    if whole.model_type not in IMAGE_TEXT:
        return whole
    text = whole.get_text_config()
    if text.model_type in TEXT_FAMILIES:
        from transformers import AutoConfig

        values = text.to_dict()
        values.pop("model_type")
        values["rope_parameters"] = {k: v for k, v in text.rope_parameters.items() if not k.startswith("mrope_")}
        if hasattr(text, "num_experts_per_tok"):
            values["norm_topk_prob"] = True  # Qwen3-VL has no such key, and always does it
        text = AutoConfig.for_model(TEXT_FAMILIES[text.model_type], **values)
    text.tie_word_embeddings = whole.tie_word_embeddings
    return text


def whole_config(where: str, block: ModelBlock) -> PreTrainedConfig:
    """Returns the configuration at a folder or a hub id, with the changes of the job (`model.config`).

    Raises:
        UserError: it cannot be read, a changed key is unknown or its value impossible, or loading it would run code
            that the job does not allow.
    """
    from transformers import AutoConfig

    if Path(where).is_dir():
        read_config(Path(where))
    else:
        require_repository(where, "model", revision=block.revision)
    with user_file_errors(f"the configuration of the model {block.name}"):
        config = AutoConfig.from_pretrained(where, revision=block.revision, trust_remote_code=block.trust_remote_code)
    if block.config:
        config = _with_changes(config, where, block)
    parts = (config, *(getattr(config, name, None) for name in config.sub_configs))
    for part, name in product(parts, ("_attn_implementation", "_experts_implementation")):
        kernel = getattr(part, name, None)
        if isinstance(kernel, str) and "/" in kernel and not block.trust_remote_code:
            message = f"the configuration of the model {block.name} asks for code from the hub, {kernel}"
            raise UserError(Problem(message, "write model.trust_remote_code: true if you trust it"))
    return config


def _with_changes(config: PreTrainedConfig, where: str, block: ModelBlock) -> PreTrainedConfig:
    text = config.get_text_config()
    known = text.to_dict().keys() - FIXED
    known |= set(ROPE) if known & set(ROPE) else set()
    for key in block.config:
        if key in FIXED:
            raise UserError(Problem(f"`model.config`: `{key}` cannot be changed", key=f"model.config.{key}"))
        if key not in known:
            near = text.attribute_map.get(key) or nearest(key, known)
            message = f"`model.config`: a configuration of the family {config.model_type} has no key `{key}`"
            raise UserError(Problem(message, f"write `{near}`" if near else "", key=f"model.config.{key}"))
    changes = {**block.config, **_rope_changes(text, block)}
    with user_file_errors(f"the configuration of the model {block.name}, changed by model.config,"):
        stored, _ = type(config).get_config_dict(where, revision=block.revision)
        changed: PreTrainedConfig = type(config).from_dict(changed_config(stored, changes))
    changed.name_or_path = config.name_or_path
    return changed


def _rope_changes(text: PreTrainedConfig, block: ModelBlock) -> dict[str, Any]:
    """Returns the keys of rotary embeddings as transformers 5 has them, if they are among the changes."""
    key = next((key for key in ROPE if key in block.config), None)
    stored, asked = getattr(text, ROPE[0], None), block.config.get(key or "")
    if key is None or not isinstance(stored, Mapping):
        return {}
    kinds = kinds_of_rope(stored)
    if kinds and isinstance(asked, Mapping) and not asked.keys() <= set(kinds):
        message = f"`model.config`: positions of the family {text.model_type} differ by the kind of layer"
        hint = f"write `{key}` with the kinds to be changed: {', '.join(kinds)}"
        raise UserError(Problem(message, hint, key=f"model.config.{key}"))
    return {ROPE[0]: changed_rope(stored, asked), ROPE[1]: None}


def generation_config(where: str, revision: str | None = None) -> GenerationConfig | None:
    """Reads the generation settings of a folder or a hub id; returns None if there are none.

    Raises:
        UserError: they cannot be read.
    """
    from transformers import GenerationConfig
    from transformers.utils.hub import cached_file

    missing = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    with user_file_errors(f"{GENERATION} of {where}"):
        file = cached_file(where, GENERATION, revision=revision, **missing)
        if file is None:
            return None
        check_settings(Path(file).parent)
        return GenerationConfig.from_pretrained(str(Path(file).parent))
