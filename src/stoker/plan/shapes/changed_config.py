"""A model's configuration with the changes that a job asks for (`model.config`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
# Lists with one entry for each block in transformers' configurations. Others, such as `eos_token_id`, may have as many
# entries by chance.
OF_EACH_BLOCK = frozenset(
    {
        *("layer_types", "mlp_layer_types", "layers_block_type", "indexer_types", "attention_layers", "attn_layers"),
        *("layer_rope_theta", "no_rope_layers", "rope_scaling_layers", "sliding_windows", "kv_source_layers"),
        *("num_attention_heads_per_layer", "num_key_value_heads_per_layer", "moe_layers", "full_attn_idxs"),
        *("intermediate_size", "activation_sparsity_pattern"),
    }
)
ROPE = ("rope_parameters", "rope_scaling")  # the second in checkpoints of transformers 4, which has the base beside it
OF_EVERY_ROPE = ("rope_theta", "partial_rotary_factor")


def changed_config(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the content of a ``config.json`` with changed keys; of an image-text model, those of its language model.

    A mapping, such as ``rope_parameters``, is changed key by key. Lists with one entry for each block, such as
    ``layer_types``, are left out if the number of blocks changes, so that the family's rule gives them.
    """
    inner = config.get("text_config")
    if isinstance(inner, Mapping):
        return {**config, "text_config": changed_config(inner, changes)}
    values = {**config, **_rope(config, changes)}
    layers = next((config[key] for key in LAYERS if key in changes and key in config), None)
    for key in OF_EACH_BLOCK & values.keys() - changes.keys():
        if isinstance(values[key], list) and len(values[key]) == layers:
            del values[key]
    for key, value in changes.items():
        if key not in ROPE:
            values[key] = _merged(config.get(key), value)
    return values


def _rope(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keys of rotary embeddings, if they are among the changes."""
    asked = next((changes[key] for key in ROPE if key in changes), None)
    if not isinstance(asked, Mapping):
        return {key: changes[key] for key in ROPE if key in changes}
    stored: Mapping[str, Any] = next((config[key] for key in ROPE if isinstance(config.get(key), Mapping)), {})
    beside = {key: config[key] for key in OF_EVERY_ROPE if key in config and not _by_kind(stored)}
    return {"rope_parameters": _merged({**beside, **stored}, asked), "rope_scaling": None}


def _by_kind(rope: Mapping[str, Any]) -> bool:
    """Returns whether rotary embeddings differ by the kind of layer (Gemma 3)."""
    return any(isinstance(value, Mapping) for value in rope.values())


def _merged(stored: Any, asked: Any) -> Any:
    if not isinstance(stored, Mapping) or not isinstance(asked, Mapping):
        return asked
    if _type(asked) not in (None, _type(stored)):  # the numbers of another type have no effect
        stored = {key: value for key, value in stored.items() if key in OF_EVERY_ROPE}
    return {**stored, **{key: _merged(stored.get(key), value) for key, value in asked.items()}}


def _type(rope: Mapping[str, Any]) -> Any:
    return rope.get("rope_type", rope.get("type"))
