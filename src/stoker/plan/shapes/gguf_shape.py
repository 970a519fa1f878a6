"""Reads the shape of a model from the header of a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stoker.errors import Problem, UserError
from stoker.plan.shape import Shape
from stoker.plan.shapes.changed_config import changed_config
from stoker.plan.shapes.shape_of_config import shape_of_config

# Keys behind the architecture's name in the header (ggml's docs/gguf.md), and those of a configuration.
KEYS = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "context_length": "max_position_embeddings",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
EMBEDDING = "token_embd.weight"
FAMILIES = {"gptneox": "gpt_neox", "qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe", "command-r": "cohere"}


def shape_of_gguf(path: Path, changes: Mapping[str, Any] | None = None) -> Shape:
    """Returns the shape of the model in a file; only its header is read.

    Args:
        changes: changed keys of its configuration, by transformers' names.

    Raises:
        UserError: the file cannot be read, the package gguf is missing, or the family is unknown.
    """
    try:
        from stoker.plan.shapes.gguf_reader import BoundedGGUFReader
    except ImportError as error:
        raise UserError(Problem("a GGUF file needs the package gguf", "pip install 'stoker[gguf]'")) from error
    try:
        reader = BoundedGGUFReader(path)
        architecture = str(reader.fields["general.architecture"].contents())
        config: dict[str, Any] = {
            name: reader.fields[f"{architecture}.{key}"].contents()
            for key, name in KEYS.items()
            if f"{architecture}.{key}" in reader.fields
        }
    except Exception as error:  # for a damaged file the reader may raise any exception
        raise UserError(Problem(f"the header cannot be read: {error}", file=str(path))) from error
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    if EMBEDDING not in tensors:
        raise UserError(Problem(f"it has no tensor {EMBEDDING}", file=str(path)))
    config["model_type"] = FAMILIES.get(architecture, architecture)
    config["vocab_size"] = int(tensors[EMBEDDING].shape[-1])
    config["tie_word_embeddings"] = "output.weight" not in tensors
    return shape_of_config(changed_config(config, changes or {}), name=path.stem, place=str(path))
