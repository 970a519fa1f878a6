"""A model's configuration with the changes that a job asks for (`model.config`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
PLAIN = {"rope_type": "default"}  # rotary embeddings without a scaling
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
OF_EVERY_ROPE = ("rope_theta", "partial_rotary_factor")


def changed_config(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the content of a ``config.json`` with changed keys; of an image-text model, those of its language model.

    A mapping, such as ``rope_parameters``, is changed key by key. Lists with one entry for each block, such as
    ``layer_types``, are left out if the number of blocks changes, so that the family's rule gives them.
    """
    inner = config.get("text_config")
    if isinstance(inner, Mapping):
        return {**config, "text_config": changed_config(inner, changes)}
    values = dict(config)
    layers = next(
        (config[key] for key in LAYERS if key in changes and config.get(key) not in (None, changes[key])), None
    )
    for key in OF_EACH_BLOCK & values.keys() - changes.keys():
        if isinstance(values[key], list) and len(values[key]) == layers:
            del values[key]
    return values | {key: _merged(config.get(key), value) for key, value in changes.items()}


def changed_rope(rope: Mapping[str, Any], asked: Any) -> Any:
    """Returns the parameters of rotary embeddings, which may differ by the kind of layer (Gemma 3), with changed keys.

    Args:
        asked: the changes; None for no scaling, with the base as it is.
    """
    if asked is None:
        asked = dict.fromkeys(kinds_of_rope(rope), PLAIN) or PLAIN
    return _merged(rope, asked)


def kinds_of_rope(rope: Mapping[str, Any]) -> list[str]:
    """Returns the kinds of layers that have their own rotary embeddings; none if all have the same."""
    return [kind for kind, value in rope.items() if isinstance(value, Mapping)]


def _merged(stored: Any, asked: Any) -> Any:
    if not isinstance(stored, Mapping) or not isinstance(asked, Mapping):
        return asked
    if _type(asked) not in (None, _type(stored)):  # the numbers of another type have no effect
        stored = {key: value for key, value in stored.items() if key in OF_EVERY_ROPE}
    return {**stored, **{key: _merged(stored.get(key), value) for key, value in asked.items()}}


def _type(rope: Mapping[str, Any]) -> Any:
    return rope.get("rope_type", rope.get("type"))
