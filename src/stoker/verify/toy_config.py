"""A model's configuration, shrunk: the same family and the same features with a few thousand weights."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import LlamaConfig, PreTrainedConfig

from stoker.errors import UserError
from stoker.job.blocks.model_block import ModelBlock
from stoker.models import hf_config as models_config
from stoker.models import offline_models
from stoker.models.model_files import settings_of
from stoker.models.model_source import find_model

HEADS, HEAD_SIZE = 8, 8  # fewest heads, if the job's model has that many
WIDTH = HEADS * HEAD_SIZE
GROUPED = 2  # fewest key-value heads of a model that has fewer of them than query heads
LARGEST_GROUP = 4  # most query heads per key-value head; more are reduced with an equal remainder
VOCABULARY = 131  # a prime: divisible by no number of processes
MLP_WIDTH, EXPERT_WIDTH, EXPERTS, CHOSEN = 96, 32, 4, 2
CONTEXT = 128
LINEAR_EPSILON = 1e-2  # of norms in models with linear attention
WINDOW = 6  # tokens of a sliding window: fewer than a document of the twin has

# The families' names of the same number; transformers maps most others onto the first.
SIZES: dict[str, int] = {
    "vocab_size": VOCABULARY,
    "head_dim": HEAD_SIZE,
    "query_pre_attn_scalar": HEAD_SIZE,
    "max_position_embeddings": CONTEXT,
    "n_positions": CONTEXT,
    "rotary_dim": HEAD_SIZE // 2,
    "sliding_window": WINDOW,
    "window_size": WINDOW,
    "attention_chunk_size": WINDOW,
    "floor_scale": WINDOW,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": HEAD_SIZE,  # which is the ``head_dim`` of rotary embeddings in these models
    "qk_nope_head_dim": HEAD_SIZE // 2,
    "qk_head_dim": HEAD_SIZE + HEAD_SIZE // 2,
    "v_head_dim": HEAD_SIZE,
    "index_n_heads": 2 * HEADS,  # with few, two keys often have the score 0, and either may be selected
    "index_head_dim": 2 * HEAD_SIZE,
    "index_topk": WINDOW,
    "state_size": 4,
    "linear_key_head_dim": HEAD_SIZE // 2,
    "linear_value_head_dim": HEAD_SIZE,
    "n_group": 1,
    "topk_group": 1,
}
COUNTS = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_experts_per_tok")
# Beside heads, a tensor-parallel layout splits neurons and experts: the fewest of each.
SHARED_OUT: dict[str, int] = {
    "intermediate_size": MLP_WIDTH,
    "intermediate_size_mlp": MLP_WIDTH,
    "ffn_dim": MLP_WIDTH,
    "ffn_hidden_size": MLP_WIDTH,
    "n_inner": MLP_WIDTH,
    "moe_intermediate_size": EXPERT_WIDTH,
    "shared_expert_intermediate_size": EXPERT_WIDTH,
    "shared_intermediate_size": EXPERT_WIDTH,
    "num_experts": EXPERTS,
    "num_local_experts": EXPERTS,
    "n_routed_experts": EXPERTS,
}
LAYER_LISTS = ("layer_types", "mlp_layer_types", "indexer_types", "no_rope_layers")  # lists with one entry per block


@dataclass(frozen=True)
class ToyShape:
    """Required shape of a twin's model.

    Attributes:
        blocks: number of blocks.
        tensor: processes that heads, neurons and experts are split over; the remainders equal those of the job's model.
        exchanged: processes that exchange the heads of one of those.
    """

    blocks: int = 4
    tensor: int = 1
    exchanged: int = 1


@dataclass(frozen=True)
class HeadCounts:
    """Attention heads of a model: ``query`` heads, equal groups of which share the ``keys`` key-value heads."""

    query: int
    keys: int


def heads_of(
    whole: PreTrainedConfig, shape: ToyShape, counts: tuple[str, str] = ("num_attention_heads", "num_key_value_heads")
) -> HeadCounts:
    """Returns the fewest heads that leave the same remainders over the processes as the model's own.

    Args:
        counts: keys of the numbers of query heads and of key-value heads.
    """
    whole = _with_common_sizes(whole)
    query = int(getattr(whole, counts[0]))
    keys = getattr(whole, counts[1], None) or getattr(whole, "num_kv_heads", None) or query
    parts = shape.tensor * shape.exchanged
    group = max(1, query // keys)
    if group > LARGEST_GROUP:
        group = _alike(group, parts, LARGEST_GROUP)
    if keys < shape.tensor:  # several processes compute the same key-value head
        return HeadCounts(keys * group, keys)
    keys = _alike(keys, parts, max(min(keys, GROUPED), min(keys, -(-HEADS // group)), min(keys, shape.tensor)))
    return HeadCounts(keys * group, keys)


def _alike(number: int, parts: int, least: int) -> int:
    """Returns the smallest number from ``least`` on with the same remainder modulo ``parts`` as ``number``."""
    return least + (number - least) % parts


def config_of(block: ModelBlock, base: Path) -> PreTrainedConfig:
    """Returns the configuration of a job's model without reading weights.

    Raises:
        UserError: the model does not exist, or its configuration cannot be read.
    """
    source = find_model(block.name, base)
    if source is None:
        raise UserError(f"there is no model {block.name!r}")
    if source.kind == "scratch":
        shape = offline_models.SCRATCH[source.where]
        return LlamaConfig(
            hidden_size=shape.width,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads,
            tie_word_embeddings=True,
        )
    where = settings_of(source, block.revision, own_code=block.trust_remote_code)
    return models_config.config_of(where, block)


def shrunk(original: PreTrainedConfig, shape: ToyShape, *, dropout: bool = False) -> PreTrainedConfig:
    """Shrinks a configuration: heads, neurons and experts split as the model's own do, layers are of the same kinds.

    Sliding windows are shorter than the twin's documents, so that they have an effect.

    Args:
        dropout: whether to keep the model's dropout.
    """
    whole = original.get_text_config()
    values: dict[str, Any] = whole.to_dict()
    for name in ("quantization_config", "_name_or_path", "auto_map", "dtype", "torch_dtype", "architectures"):
        values.pop(name, None)
    names = {name: getattr(whole, "attribute_map", {}).get(name, name) for name in (*SIZES, *SHARED_OUT, *COUNTS)}
    for name, size in SIZES.items():
        if values.get(names[name]) is not None:  # None is derived from other numbers
            values[names[name]] = size
    values[names["num_hidden_layers"]] = shape.blocks
    heads = heads_of(whole, shape)
    values[names["num_attention_heads"]] = heads.query
    values[names["hidden_size"]] = width = heads.query * HEAD_SIZE
    for name in ("num_key_value_heads", "num_kv_heads"):
        if values.get(name) is not None:
            values[name] = heads.keys
    values.update(_linear_attention(whole, shape))
    values.update(_heads_by_layer(values, heads))
    for name, least in SHARED_OUT.items():
        if isinstance(values.get(names[name]), int):
            values[names[name]] = _alike(values[names[name]], shape.tensor, max(least, shape.tensor))
    for name in (names["num_experts_per_tok"], "moe_topk", "top_k_experts"):  # Hunyuan may list those of its blocks
        if values.get(name) is not None:
            values[name] = min(values[name], CHOSEN) if isinstance(values[name], int) else CHOSEN
    values.update(_layers(values, shape.blocks))
    values.update(_rotary(values))
    if "word_embed_proj_dim" in values:  # the head of some OPT models has another width than the blocks
        values["word_embed_proj_dim"] = width if whole.word_embed_proj_dim == whole.hidden_size else width // 2
    for name, value in values.items():
        noise = name in ("router_jitter_noise", "input_jitter_noise")
        if ("drop" in name and isinstance(value, float) and not dropout) or noise:
            values[name] = 0.0
    kinds = type(whole).__annotations__
    values.update({name: 0 if kinds.get(name) is int else None for name in values if name.endswith("_token_id")})
    small = type(whole).from_dict(values)
    small.architectures = None
    return small


def _with_common_sizes(config: PreTrainedConfig) -> PreTrainedConfig:
    """Returns a configuration whose sizes can be read although some layers have others."""
    if not getattr(config, "is_heterogeneous", False):
        return config
    config = copy.deepcopy(config)
    config.allow_global_per_layer_attribute_access = True
    return config


def _heads_by_layer(values: dict[str, Any], heads: HeadCounts) -> dict[str, Any]:
    """Returns the sizes of Gemma 4's layers with full attention, and those of its small models; empty for others.

    Takes the sizes of single layers out of ``values``.
    """
    layers = values.pop("per_layer_config", None)
    if not layers:
        return {}
    whole_keys, full = values["num_key_value_heads"], next(iter(layers.values()))
    fewer = max(1, whole_keys // full.get("num_key_value_heads", whole_keys))
    found = {"global_head_dim": 2 * HEAD_SIZE, "num_global_key_value_heads": max(1, heads.keys // fewer)}
    if values["hidden_size_per_layer_input"]:
        found |= {"hidden_size_per_layer_input": HEAD_SIZE, "vocab_size_per_layer_input": VOCABULARY}
    return found


def _linear_attention(whole: PreTrainedConfig, shape: ToyShape) -> dict[str, Any]:
    """Returns the heads of linear attention, groups of value heads with a key head, and epsilon; empty without it.

    The output for a document's first token is the value times the product of query and key, normalised: with a small
    epsilon that is little more than the sign of the product, and rounding flips it.
    """
    counts = "linear_num_value_heads", "linear_num_key_heads"
    if not hasattr(whole, counts[1]):
        return {}
    heads = heads_of(whole, shape, counts)
    return {counts[0]: heads.query, counts[1]: heads.keys, "rms_norm_eps": LINEAR_EPSILON}


def _layers(values: dict[str, Any], blocks: int) -> dict[str, Any]:
    """Shortens lists with an entry per block to the twin's blocks, keeping every kind of layer."""
    found: dict[str, Any] = {}
    for name in LAYER_LISTS:
        if values.get(name):
            kinds = list(dict.fromkeys(values[name]))
            found[name] = [kinds[i % len(kinds)] for i in range(blocks)]
    if values.get("attention_layers"):  # GPT-Neo
        kinds = list(dict.fromkeys(values["attention_layers"]))
        found["attention_layers"] = [kinds[i % len(kinds)] for i in range(blocks)]
        found["attention_types"] = [[found["attention_layers"], 1]]
    if values.get("mlp_only_layers"):
        found["mlp_only_layers"] = [0]
    if values.get("decoder_sparse_step"):
        found["decoder_sparse_step"] = min(2, values["decoder_sparse_step"])
    if values.get("first_k_dense_replace"):
        found["first_k_dense_replace"] = 1
    if values.get("moe_layers"):
        found["moe_layers"] = [i for i in values["moe_layers"] if i < blocks] or [blocks - 1]
    if values.get("num_kv_shared_layers"):
        found["num_kv_shared_layers"] = max(1, blocks - len(set(values["layer_types"])))
    if values.get("max_window_layers"):
        found["max_window_layers"] = 1
    return found


def _rotary(values: dict[str, Any]) -> dict[str, Any]:
    """Shortens lists of rotary factors, one per frequency, to a small head's number of frequencies."""

    def cut(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: cut(item) for name, item in value.items()}
        return value[: HEAD_SIZE // 2] if isinstance(value, list) else value

    return {name: cut(values[name]) for name in ("rope_parameters", "rope_scaling") if values.get(name)}
