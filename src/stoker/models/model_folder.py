"""Checks of a model folder by file names, JSON and headers, before anything is loaded."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import product
from pathlib import Path, PurePosixPath
from typing import Any

from safetensors import SafetensorError, safe_open

from stoker.errors import Problem, UserError, reason_of
from stoker.node_cache.remote_folder import with_weights
from stoker.plan.shapes.most_layers import MOST_LAYERS, most_layers

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model"),
    *("sentencepiece.bpe.model", "tekken.json"),
)
# Positive numbers in a configuration; some families give a list, one number for each layer.
COUNTS = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("intermediate_size", "n_embd", "n_layer", "n_head", "num_layers", "n_layers"),
)
LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
# Above all models. Each layer is built in Python, and the model's code allocates tables of the vocabulary.
MOST = {**dict.fromkeys(LAYERS, MOST_LAYERS), "vocab_size": 100_000_000}
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")  # of a layer
CHOSEN = ("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts")  # experts of a token
ACTIVATION_KEYS = ("hidden_act", "activation_function")
ACTIVATIONS = {  # transformers.activations.ACT2CLS, whose module imports torch
    *("gelu", "gelu_10", "gelu_accurate", "gelu_fast", "gelu_new", "gelu_python", "gelu_python_tanh"),
    *("gelu_pytorch_tanh", "hardswish", "laplace", "leaky_relu", "linear", "mish", "prelu", "quick_gelu", "relu"),
    *("relu2", "relu6", "sigmoid", "silu", "sqrtsoftplus", "swish", "tanh", "xielu"),
}
WHOLE_NUMBERS = ("I8", "U8", "I16", "U16", "I32", "U32", "I64", "U64", "BOOL")
GENERATION = "generation_config.json"
SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", GENERATION)
QUICKLY_READ = 4_000_000  # bytes of a tokenizer.json, a tenth of a second


def read_config(folder: Path) -> dict[str, Any]:
    """Returns the content of ``config.json``.

    Raises:
        UserError: it is not a JSON object, or a value in it is impossible.
    """
    file = folder / "config.json"
    config = _object(file, "no model's configuration")
    for block in _blocks(config):
        what = _config_problem(block, own_code="auto_map" in config)
        if what is not None:
            raise UserError(Problem(what, "mend it, or save the model again", file=str(file)))
    kind = config.get("model_type")
    if kind is not None and not isinstance(kind, str):
        raise UserError(Problem(f"`model_type` must be text, not {kind!r}", "save the model again", file=str(file)))
    return config


def _config_problem(block: dict[str, Any], *, own_code: bool) -> str | None:
    for key in COUNTS:
        value = block.get(key)
        is_count = isinstance(value, int) and not isinstance(value, bool) and value > 0
        if not (is_count or value is None or isinstance(value, list)):
            return f"`{key}` must be a whole number above 0, not {value!r}"
        if key in MOST and isinstance(value, int) and value > MOST[key]:
            return f"`{key}` is {value:,}, and models have at most {MOST[key]:,}"
    experts = max((block[key] for key in EXPERTS if isinstance(block.get(key), int)), default=0)
    for key in CHOSEN:
        value = block.get(key)
        if experts and isinstance(value, int) and not 0 <= value <= experts:
            return f"`{key}` must be 1 to {experts}, the number of experts, not {value}"
    for key in ACTIVATION_KEYS:
        value = block.get(key)
        if isinstance(value, str) and value not in ACTIVATIONS and not own_code:
            return f"`{key}` must be an activation function of transformers, not {value!r}"
    return None


def _blocks(config: dict[str, Any]) -> list[dict[str, Any]]:
    return [block for block in (config, config.get("text_config")) if isinstance(block, dict)]


def check_layers(folder: Path, config: dict[str, Any], names: Iterable[str]) -> None:
    """Checks the layers of a configuration against the names of the weights.

    Raises:
        UserError: it has more layers than the weights.
    """
    most = most_layers(names)
    for block, key in product(_blocks(config), LAYERS):
        value = block.get(key)
        if isinstance(value, int) and value > most:
            what = f"`{key}` is {value:,}, and the weights have at most {most:,} layers"
            raise UserError(Problem(what, "mend it, or save the model again", file=str(folder / "config.json")))


def check_settings(folder: Path) -> None:
    """Checks the other JSON files of a model folder: the tokenizer, and the settings of tokenizer and generation.

    Raises:
        UserError: a file is not a JSON object, or stop tokens are not tokens.
    """
    for name in SETTINGS:
        if (folder / name).is_file():
            content = _object(folder / name, "no JSON object")
            if name == GENERATION:
                _check_stops(folder / name, content)
    vocabulary = folder / "tokenizer.json"
    if vocabulary.is_file() and vocabulary.stat().st_size <= QUICKLY_READ:
        _object(vocabulary, "no JSON object")


def _check_stops(file: Path, content: dict[str, Any]) -> None:
    stops, strings = content.get("eos_token_id"), content.get("stop_strings")
    if not all(type(stop) is int for stop in (stops if isinstance(stops, list) else [stops or 0])):
        raise UserError(Problem(f"`eos_token_id` must be token ids, not {stops!r}", file=str(file)))
    if not all(isinstance(text, str) for text in (strings if isinstance(strings, list) else [strings or ""])):
        raise UserError(Problem(f"`stop_strings` must be texts, not {strings!r}", file=str(file)))


def weight_files(folder: Path) -> list[Path]:
    """Returns the safetensors files of a model: the single one, or those of the index; empty if there are none.

    Raises:
        UserError: the index cannot be read, or names a file that is not in the folder.
        RunFailed: those of a folder at a URL cannot be downloaded.
    """
    with_weights(folder)
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if not (folder / INDEX).is_file():
        return []
    files = [folder / name for name in check_index(folder / INDEX)]
    missing = next((file for file in files if not file.is_file()), None)
    if missing is not None:
        raise UserError(Problem(f"the file {missing.name} is missing", "copy it too", file=str(folder / INDEX)))
    return files


def check_index(index: Path) -> list[str]:
    """Returns the names of the files of an index.

    Raises:
        UserError: it cannot be read, or names a file outside of its own folder.
    """
    names = _object(index, "no index of weights").get("weight_map")
    if not isinstance(names, dict) or not names:
        raise UserError(Problem("`weight_map` must give the file of each weight", file=str(index)))
    for key, name in names.items():
        if not isinstance(name, str) or PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise UserError(Problem(f"the file of {key} is {name!r}, which is not in this folder", file=str(index)))
    return sorted(set(names.values()))


def check_header(file: Path, *, quantised: bool) -> list[str]:
    """Checks a safetensors file against its own header, and returns the names of its tensors.

    Args:
        quantised: whether the configuration defines how integers become weights.

    Raises:
        UserError: the header cannot be read, does not fit the file, or declares weights as integers.
    """
    try:
        with safe_open(file, "np") as opened:
            kinds = {name: opened.get_slice(name).get_dtype() for name in opened.keys()}  # noqa: SIM118 -- no dictionary
    except SafetensorError as error:
        what = str(error).removeprefix("Error while deserializing header: ")
        raise UserError(
            Problem(f"damaged safetensors file: {what}", "copy or save it again", file=str(file))
        ) from error
    whole = next((n for n, kind in kinds.items() if n.endswith(".weight") and kind in WHOLE_NUMBERS), None)
    if whole is not None and not quantised:
        message = f"{whole} contains integers ({kinds[whole]}), and config.json does not give their scale"
        raise UserError(Problem(message, "give the model as it was before it was quantised", file=str(file)))
    return list(kinds)


def _object(file: Path, no_kind: str) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise UserError(Problem(f"this is {no_kind}: {reason_of(error)}", "save it again", file=str(file))) from error
    if not isinstance(content, dict):
        raise UserError(Problem(f"this is {no_kind}, but has no keys", "save it again", file=str(file)))
    return content
