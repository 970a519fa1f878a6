"""Loads models by name: from the hub, a folder, a GGUF file, or random; on the meta device, with a weight source."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

from stoker.errors import Problem, UserError, user_file_errors
from stoker.job.blocks.model_block import ModelBlock
from stoker.job.blocks.tune_block import TuneBlock
from stoker.models import grouped_experts, offline_models
from stoker.models.config_size import check_size
from stoker.models.hf_config import config_of, text_config, whole_config
from stoker.models.image_text import ImageText, TextWeights
from stoker.models.init_weights import Initial
from stoker.models.meta_model import META, parameters_on_meta
from stoker.models.model_files import settings_of, weights_of
from stoker.models.model_folder import INDEX, WEIGHTS, check_index, weight_files
from stoker.models.model_from_config import bound_scores, model_from_config
from stoker.models.model_source import ModelSource, quantised_problem, require_model
from stoker.models.safetensors_reader import Stored
from stoker.models.tuning.adapter_targets import experts_to_train
from stoker.models.tuning.quantise import (
    check_quantised,
    check_widths,
    compute_exactly,
    packed_parameters,
    quantisation,
)
from stoker.models.weight_source import InMemoryWeights, WeightSource
from stoker.node_cache.hub import require_repository
from stoker.node_cache.remote_folder import with_weights

# The settings that make attention in both directions causal. CPM-Ant has none.
SCORE = "score.weight"  # of transformers' sequence classifiers
CAUSAL = {
    "is_decoder": 'write `"is_decoder": true` into its config.json, or name a causal model',
    "use_bidirectional_attention": "name a causal model",
    "xlnet": 'write `"attn_type": "uni"` into its config.json, or name a causal model',
    "cpmant": "name a causal model",
}


@dataclass(frozen=True)
class Blank:
    """A model with its parameters on the meta device, and the source of their values.

    A quantised model has its values already: its library quantises while it reads.

    Attributes:
        left_out: number of parameters of an image-text model outside of its language model, which are not loaded.
        scores: reads the score head of a classifier with one label, shape (1, D); None for a language model.
    """

    model: PreTrainedModel
    weights: WeightSource
    left_out: int = 0
    scores: Callable[[], Tensor] | None = None


def blank_model(
    block: ModelBlock,
    base: Path,
    *,
    seed: int,
    dtype: torch.dtype = torch.float32,
    stop_id: int | None = None,
    storage: torch.dtype = torch.uint8,
    stored_in_bits: bool = False,
    tune: TuneBlock | None = None,
) -> Blank:
    """Returns the model of a job, its parameters on the meta device.

    Args:
        block: the job's ``model:``.
        base: the folder that relative paths start from.
        seed: of the random weights of a model from scratch.
        stop_id: the end token in the configuration of a model from scratch.
        storage: type of packed 4-bit weights, see `stoker.models.tuning.quantise.quantisation`.
        stored_in_bits: whether the files may contain quantised weights that ``block`` does not name, on which nothing
            can be trained.
        tune: what will be trained, and cannot be quantised; None for nothing.

    Raises:
        UserError: it cannot be found or loaded, it lacks a weight, or loading it would run code that the job does
            not allow.
    """
    source = require_model(block.name, base)
    if source.kind == "scratch":
        if block.quantise != "none":
            raise UserError(f"model.quantise: {block.name} starts from random weights, which must be trained")
        fresh = _scratch_model(source.where, stop_id, dtype)
        return Blank(fresh, Initial(fresh, seed))
    if block.weights == "random":
        return _random_model(source, block, seed, stop_id, dtype)
    where = weights_of(source, block)
    whole = whole_config(where, block)
    config = text_config(whole)
    quantised = quantised_problem(block, whole.to_dict())
    if quantised is not None and not stored_in_bits:
        raise UserError(quantised)
    files = _weight_files(where, block)
    _check_model(config, block, files if quantised is None else [])
    if config is not whole:
        return _language_model(whole, block, where, files, dtype, storage, tune)
    if block.quantise != "none" or quantised is not None:
        settings = None
        if block.quantise != "none":
            unquantised = model_from_config(config, block, where, dtype)
            check_widths(unquantised, block.quantise)
            settings = _quantisation(unquantised, block, dtype, storage, tune)
        return Blank(_read_whole(block, where, dtype, settings), InMemoryWeights({}))
    if not files and block.allow_pickle:  # pickled weights cannot be read in parts
        held = _read_whole(block, where, dtype)
        return Blank(model_from_config(config, block, where, dtype), InMemoryWeights(held.state_dict()))
    if not files:
        raise UserError(f"the model {block.name} cannot be loaded: it has no .safetensors file")
    scores = None
    if is_classifier(config):
        scores = _score_head(block.name, files)
        config.tie_word_embeddings = True  # the files have no language head, which the score head replaces
    model = model_from_config(config, block, where, dtype)
    return Blank(model, Stored(block.name, files, model), scores=scores)


def is_classifier(config: PreTrainedConfig) -> bool:
    """Returns whether a checkpoint is a classifier, such as a reward model, and has no language head."""
    return any(kind.endswith("Classification") for kind in config.architectures or ())


def _read(file: Path, name: str) -> Tensor:
    with safe_open(file, "pt") as opened:
        found: Tensor = opened.get_tensor(name)
    return found


def _score_head(name: str, files: Sequence[Path]) -> Callable[[], Tensor]:
    """Returns what reads the score head of a classifier.

    Raises:
        UserError: there is none, or it has several labels.
    """
    for file in files:
        with user_file_errors(f"the weights {file}"), safe_open(file, "pt") as opened:
            if SCORE in opened.keys():  # noqa: SIM118 -- no dictionary
                labels = opened.get_slice(SCORE).get_shape()[0]
                if labels != 1:
                    raise UserError(f"{name} is a classifier with {labels} labels, and a reward model has one")
                return partial(_read, file, SCORE)
    raise UserError(f"{name} is a classifier whose files have no {SCORE}")


def _random_model(source: ModelSource, block: ModelBlock, seed: int, stop_id: int | None, dtype: torch.dtype) -> Blank:
    """Returns the model of a configuration with random weights; its tokenizer may be another model's.

    Raises:
        UserError: it cannot be built.
    """
    where = settings_of(source, block.revision, own_code=block.trust_remote_code)
    config = config_of(where, block)
    for name, token in (("bos_token_id", None), ("eos_token_id", stop_id), ("pad_token_id", None)):
        setattr(config, name, token)
    config.__dict__.pop("quantization_config", None)
    _check_model(config, block, [])
    model = model_from_config(config, block, where, dtype)
    return Blank(model, Initial(model, seed))


def _language_model(
    whole: PreTrainedConfig,
    block: ModelBlock,
    where: str,
    files: Sequence[Path],
    dtype: torch.dtype,
    storage: torch.dtype,
    tune: TuneBlock | None,
) -> Blank:
    """Returns the language model of an image-text model.

    Raises:
        UserError: its files are not safetensors, contain quantised weights, or lack one.
    """
    if getattr(whole, "quantization_config", None):
        message = f"the weights of {block.name}, an image-text model, are stored quantised, and Stoker reads no such"
        raise UserError(Problem(message, "name the model that it was made from", key="model.name"))
    if not files:
        raise UserError(f"the model {block.name} cannot be loaded: it has no .safetensors file")
    model = model_from_config(text_config(whole), block, where, dtype)
    around = ImageText.around(model, whole, block, where)
    weights = TextWeights(Stored(block.name, files, around.model), around, model)
    if block.quantise != "none":
        check_widths(model, block.quantise)
        model = weights.quantised(model, _quantisation(model, block, dtype, storage, tune))
        check_quantised(model, block.quantise)
        return Blank(model, InMemoryWeights({}), around.left_out)
    return Blank(model, weights, around.left_out)


def _quantisation(
    model: PreTrainedModel, block: ModelBlock, dtype: torch.dtype, storage: torch.dtype, tune: TuneBlock | None
) -> Any:
    grouped_experts.register()  # the products with packed experts
    kept = set() if tune is None else set(experts_to_train(model, tune))
    return quantisation(block.quantise, dtype, storage=storage, model=model, kept=kept)


def image_text_files(block: ModelBlock, base: Path) -> tuple[PreTrainedConfig, str, list[Path]] | None:
    """Returns the configuration, the place and the files of a job's base if it is an image-text model."""
    source = require_model(block.name, base)
    if source.kind not in ("folder", "hub") or block.weights == "random":
        return None
    whole = whole_config(settings_of(source, block.revision, own_code=block.trust_remote_code), block)
    return None if text_config(whole) is whole else (whole, source.where, _weight_files(source.where, block))


def meta_model(block: ModelBlock, base: Path) -> PreTrainedModel:
    """Returns the model of a job from its configuration alone, its parameters on the meta device.

    Raises:
        UserError: it cannot be found, or its configuration cannot be read.
    """
    source = require_model(block.name, base)
    if source.kind == "scratch":
        return _scratch_model(source.where, None, torch.float32)
    where = settings_of(source, block.revision, own_code=block.trust_remote_code)
    config = config_of(where, block)
    _check_model(config, block, [])
    return model_from_config(config, block, where, torch.float32)


def _check_model(config: PreTrainedConfig, block: ModelBlock, files: Sequence[Path]) -> None:
    """Checks that a model is causal, and its size, before memory for it is allocated.

    One with its own code is not checked: it may need real tensors.
    """
    if block.trust_remote_code:
        return
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        message = f"{block.name}: transformers loads no model of the family {config.model_type} as a causal one"
        text = config.get_text_config()
        hint = f"save its language model ({text.model_type}) in a folder of its own, and name that"
        apart = text is not config and type(text) in MODEL_FOR_CAUSAL_LM_MAPPING
        raise UserError(Problem(message, hint if apart else ""))
    with META, user_file_errors(f"the configuration of the model {block.name}"):
        model = AutoModelForCausalLM.from_config(config)
    decodes = [module.is_decoder for module in model.modules() if hasattr(module, "is_decoder")]
    by = "is_decoder" if decodes and not any(decodes) else config.model_type
    if getattr(config, "use_bidirectional_attention", None) in (True, "all"):  # Gemma's models of embeddings
        by = "use_bidirectional_attention"
    remedy = CAUSAL.get(by)
    if remedy is not None and getattr(config, "attn_type", None) != "uni":
        message = (
            f"{block.name}: attention of this {config.model_type} also sees the later tokens, which are the targets"
        )
        raise UserError(Problem(message, remedy))
    check_size(model, files, block.name)


def _weight_files(where: str, block: ModelBlock) -> list[Path]:
    """Returns the safetensors files of a folder or a hub id; downloads those that are not in the cache."""
    if Path(where).is_dir():
        return weight_files(Path(where))
    require_repository(where, "model", revision=block.revision, weights=True)
    optional = {"revision": block.revision, "_raise_exceptions_for_missing_entries": False}
    with user_file_errors(f"the model {block.name}"):
        if single := cached_file(where, WEIGHTS, **optional):
            return [Path(single)]
        if index := cached_file(where, INDEX, **optional):
            check_index(Path(index))
            return [Path(file) for file in get_checkpoint_shard_files(where, index, revision=block.revision)[0]]
    return []


def _read_whole(block: ModelBlock, where: str, dtype: torch.dtype, quantised: Any = None) -> PreTrainedModel:
    """Returns the model as transformers loads it, in one piece; by transformers' settings, if any, quantised."""
    if (Path(where) / "adapter_config.json").is_file():  # transformers would load the model that it names
        raise UserError(f"{block.name} contains an adapter and a model: move adapter_config.json elsewhere")
    if Path(where).is_dir():
        with_weights(Path(where))
    settings: dict[str, Any] = {}
    if quantised is not None:  # None would replace the settings of weights that are stored quantised
        settings["quantization_config"] = quantised
    if block.config:
        settings["config"] = config_of(where, block)
    with user_file_errors(f"the model {block.name}"):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            where,
            dtype=dtype,
            revision=block.revision,
            use_safetensors=None if block.allow_pickle else True,
            trust_remote_code=block.trust_remote_code,
            output_loading_info=True,
            **settings,
        )
    model, info = loaded
    bound_scores(model)
    if info["missing_keys"]:  # transformers would use random ones
        raise UserError(f"{block.name} contains no weights for {sorted(info['missing_keys'])[0]}")
    if block.quantise != "none":
        check_quantised(model, block.quantise)
    elif getattr(model.config, "quantization_config", None) is not None:  # stored quantised
        compute_exactly(model)
        for parameter in packed_parameters(model):
            if type(parameter).__module__.startswith("torchao"):  # else in the dtype that it was stored in
                parameter.data = parameter.data.to(dtype)
    return model


def _scratch_model(name: str, stop_id: int | None, dtype: torch.dtype) -> PreTrainedModel:
    """Returns the model of a catalogue size, its parameters on the meta device."""
    shape = offline_models.SCRATCH[name]
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
    with parameters_on_meta():
        model: PreTrainedModel = LlamaForCausalLM._from_config(config, dtype=dtype)
    return model
