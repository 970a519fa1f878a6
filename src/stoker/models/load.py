"""Models with their weights: from the hub, a folder, a GGUF file, or random."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel, set_seed

from stoker.errors import Problem, UserError
from stoker.job.schema import ModelBlock
from stoker.models import catalogue
from stoker.models.gguf import weights_of_gguf
from stoker.models.source import locate


def load_model(
    block: ModelBlock,
    base: Path,
    *,
    seed: int,
    dtype: torch.dtype = torch.float32,
    stop_id: int | None = None,
) -> PreTrainedModel:
    """The model of a job, on the CPU (a quantised one where its library wants it), ready to be tuned.

    Args:
        block: the job's ``model:``.
        base: the folder that relative paths start from.
        seed: of the random weights of a model from scratch.
        dtype: of the weights.
        stop_id: of a model from scratch, the end token to write into its configuration.

    Raises:
        UserError: it cannot be found or loaded, or loading it would run code that the job does not allow.
    """
    source = locate(block.name, base)
    if source is None:
        raise UserError(f"there is no model {block.name!r}")
    if source.kind == "scratch":
        fresh: nn.Module = _from_scratch(source.where, seed, stop_id)
        return fresh.to(dtype)  # type: ignore[return-value]
    where = str(weights_of_gguf(Path(source.where))) if source.kind == "gguf" else source.where
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            where,
            dtype=dtype,
            revision=block.revision,
            use_safetensors=None if block.allow_pickle else True,
            trust_remote_code=block.trust_remote_code,
            quantization_config=quantisation(block.quantise, dtype),
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError) as error:
        raise UserError(f"the model {block.name} cannot be loaded: {str(error).strip().splitlines()[0]}") from error
    model, info = loaded
    if info["missing_keys"]:  # transformers would go on with random ones
        raise UserError(f"{block.name} holds no weights for {sorted(info['missing_keys'])[0]}")
    return model


def _from_scratch(name: str, seed: int, stop_id: int | None) -> LlamaForCausalLM:
    shape = catalogue.SCRATCH[name]
    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.width,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        intermediate_size=shape.mlp_width,
        max_position_embeddings=shape.context,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=stop_id,
        pad_token_id=None,
    )
    set_seed(seed)
    return LlamaForCausalLM(config)


def quantisation(quantise: str, dtype: torch.dtype):  # type: ignore[no-untyped-def]
    """transformers' quantisation settings of ``model.quantise``, or None."""
    if quantise == "none":
        return None
    from transformers import BitsAndBytesConfig

    try:
        import bitsandbytes  # noqa: F401
    except ImportError as error:
        message = f"model.quantise: {quantise} needs the package bitsandbytes"
        raise UserError(Problem(message, "pip install 'stoker[quantise]'")) from error
    if quantise == "8bit":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )
