"""Models by name: from the hub, a folder, a GGUF file, or random; without memory first, then with their weights."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

from stoker.errors import UserError
from stoker.job.schema import ModelBlock
from stoker.models import catalogue
from stoker.models.gguf import tokenizer_of_gguf, weights_of_gguf
from stoker.models.initial import Initial
from stoker.models.meta import allocate, parameters_on_meta, set_parameter
from stoker.models.quantise import check_quantised, quantisation
from stoker.models.source import locate
from stoker.models.stored import Stored
from stoker.models.weights import Held, WeightSource, fill_whole

_WRONG_INPUT = (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError)


@dataclass(frozen=True)
class Blank:
    """A model whose parameters are on the meta device, and where their values come from.

    A quantised model has its values already, for its library quantises while it reads.
    """

    model: PreTrainedModel
    weights: WeightSource


def load_model(
    block: ModelBlock,
    base: Path,
    *,
    seed: int,
    dtype: torch.dtype = torch.float32,
    stop_id: int | None = None,
) -> PreTrainedModel:
    """The whole model of a job, on the CPU (a quantised one where its library wants it). See `blank_model`."""
    blank = blank_model(block, base, seed=seed, dtype=dtype, stop_id=stop_id)
    fill_whole(allocate(blank.model, torch.device("cpu")), blank.weights)
    return blank.model


def blank_model(
    block: ModelBlock,
    base: Path,
    *,
    seed: int,
    dtype: torch.dtype = torch.float32,
    stop_id: int | None = None,
    storage: torch.dtype = torch.uint8,
) -> Blank:
    """The model of a job without memory for its parameters.

    Args:
        block: the job's ``model:``.
        base: the folder that relative paths start from.
        seed: of the random weights of a model from scratch.
        dtype: of the weights.
        stop_id: of a model from scratch, the end token to write into its configuration.
        storage: of packed 4-bit weights, see `stoker.models.quantise.quantisation`.

    Raises:
        UserError: it cannot be found or loaded, it lacks a weight, or loading it would run code that the job does
            not allow.
    """
    source = locate(block.name, base)
    if source is None:
        raise UserError(f"there is no model {block.name!r}")
    if source.kind == "scratch":
        if block.quantise != "none":
            raise UserError(f"model.quantise: {block.name} begins with random weights, which are there to be trained")
        with parameters_on_meta():
            fresh: Any = LlamaForCausalLM._from_config(_scratch_config(source.where, stop_id), dtype=dtype)
        return Blank(fresh, Initial(fresh, seed))
    where = str(weights_of_gguf(Path(source.where))) if source.kind == "gguf" else source.where
    try:
        config = AutoConfig.from_pretrained(where, revision=block.revision, trust_remote_code=block.trust_remote_code)
        if block.quantise != "none" or getattr(config, "quantization_config", None) is not None:
            return Blank(_read_whole(block, where, dtype, storage), Held({}))
        files = _weight_files(where, block.revision)
        if not files and block.allow_pickle:  # pickled weights cannot be read in parts
            held = _read_whole(block, where, dtype)
            return Blank(_build(config, block, where, dtype), Held(held.state_dict()))
        model = _build(config, block, where, dtype)
    except _WRONG_INPUT as error:
        raise UserError(f"the model {block.name} cannot be loaded: {str(error).strip().splitlines()[0]}") from error
    if not files:
        raise UserError(f"the model {block.name} cannot be loaded: it has no .safetensors file")
    return Blank(model, Stored(block.name, files, model))


def meta_model(block: ModelBlock, base: Path) -> PreTrainedModel:
    """The model of a job by its configuration alone, its parameters on the meta device; its weights are not looked for.

    Raises:
        UserError: it cannot be found, or its configuration cannot be read.
    """
    source = locate(block.name, base)
    if source is None:
        raise UserError(f"there is no model {block.name!r}")
    if source.kind == "scratch":
        with parameters_on_meta():
            fresh: Any = LlamaForCausalLM._from_config(_scratch_config(source.where, None))
        return fresh
    where = str(tokenizer_of_gguf(Path(source.where))) if source.kind == "gguf" else source.where
    try:
        config = AutoConfig.from_pretrained(where, revision=block.revision, trust_remote_code=block.trust_remote_code)
        return _build(config, block, where, torch.float32)
    except _WRONG_INPUT as error:
        raise UserError(f"the model {block.name} cannot be built: {str(error).strip().splitlines()[0]}") from error


def _build(config: PreTrainedConfig, block: ModelBlock, where: str, dtype: torch.dtype) -> PreTrainedModel:
    """The model of a configuration, its parameters on the meta device, its buffers real."""
    with parameters_on_meta():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=block.trust_remote_code)
        for module in model.modules():  # buffers again, now that float32 is the default: as when transformers loads
            module.__dict__.pop("_is_hf_initialized", None)
        model.initialize_weights()
    _keep_exact(model, dtype)
    with suppress(OSError):  # where there is none, the one made from the model's configuration stays
        model.generation_config = GenerationConfig.from_pretrained(where, revision=block.revision or "main")
    return model.eval()


def _keep_exact(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Puts the few weights that a family wants in float32 whatever the others are into it."""
    for pattern, kept in model._get_dtype_plan(dtype).items():
        named = re.compile(pattern.replace("*", ".*"))
        for name, parameter in list(model.named_parameters()):
            if named.search(name):
                set_parameter(model, name, nn.Parameter(parameter.to(kept), parameter.requires_grad))
        for name, buffer in model.named_buffers():
            if named.search(name):
                buffer.data = buffer.to(kept)


def _weight_files(where: str, revision: str | None) -> list[Path]:
    """The safetensors files of a folder or a hub id, which are got from the hub where they are not here yet."""
    optional = {"revision": revision, "_raise_exceptions_for_missing_entries": False}
    if single := cached_file(where, "model.safetensors", **optional):
        return [Path(single)]
    if index := cached_file(where, "model.safetensors.index.json", **optional):
        return [Path(file) for file in get_checkpoint_shard_files(where, index, revision=revision)[0]]
    return []


def _read_whole(
    block: ModelBlock, where: str, dtype: torch.dtype, storage: torch.dtype = torch.uint8
) -> PreTrainedModel:
    """The model as transformers loads it, in one piece."""
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        where,
        dtype=dtype,
        revision=block.revision,
        use_safetensors=None if block.allow_pickle else True,
        trust_remote_code=block.trust_remote_code,
        quantization_config=quantisation(block.quantise, dtype, storage=storage),
        output_loading_info=True,
    )
    model, info = loaded
    if info["missing_keys"]:  # transformers would go on with random ones
        raise UserError(f"{block.name} holds no weights for {sorted(info['missing_keys'])[0]}")
    if block.quantise != "none":
        check_quantised(model, block.quantise)
    return model


def _scratch_config(name: str, stop_id: int | None) -> LlamaConfig:
    shape = catalogue.SCRATCH[name]
    return LlamaConfig(
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
