"""Exports of runs that trained the language model of an image-text model, for programs that load the whole model."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from peft import LoraConfig
from safetensors.torch import load_file, save_file
from transformers.utils.hub import cached_file

from stoker.checkpoint.export.adapter_export import PREFIX, WEIGHTS
from stoker.checkpoint.load_run import TunedRun
from stoker.errors import UserError
from stoker.job.task_spec import task_of
from stoker.models.image_text import ImageText
from stoker.models.load_model import image_text_files
from stoker.models.resize_embeddings import set_vocabulary
from stoker.models.safetensors_reader import Stored
from stoker.models.tuning.adapters import unwrap

PROCESSOR = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
FACTORS = re.compile(rf"{re.escape(PREFIX)}(.+)\.(lora_A\.weight|lora_embedding_A)")


def check_image_text(tuned: TunedRun, form: str, *, quantise: str | None) -> None:
    """Raises UserError if a run over an image-text model cannot be exported in this form."""
    assert tuned.job.model is not None
    if image_text_files(tuned.job.model, tuned.base) is None:
        return
    if quantise:
        raise UserError(f"--quantise {quantise}: image-text models are exported in fp32, bf16 or fp16")
    if form == "adapter" and task_of(tuned.job).model.head == "score":
        raise UserError("transformers loads no scores of an image-text model with an adapter: write --format merged")


def with_image_part(tuned: TunedRun, base: Path) -> TunedRun:
    """Returns a merged run with the image-text model that its base is, if it is one, in the place of its own model.

    Other weights than the language model's have their stored values.

    Raises:
        UserError: the files of the base cannot be read any more.
    """
    block = tuned.job.model
    text: Any = unwrap(tuned.model)
    assert block is not None
    found = image_text_files(block, base)
    if found is None:
        return tuned
    config, where, files = found
    around = ImageText.around(text, config, block, where)
    model: Any = around.with_weights(text, Stored(block.name, files, around.model))
    rows = text.get_input_embeddings().weight.shape[0]
    if rows != config.get_text_config().vocab_size:
        set_vocabulary(model, rows)
    return replace(tuned, model=model)


def copy_processor(tuned: TunedRun, base: Path, folder: Path) -> None:
    """Copies the settings of the image processor of a run's base into an export, if the base is an image-text model."""
    assert tuned.job.model is not None
    found = image_text_files(tuned.job.model, base)
    if found is None:
        return
    for name in PROCESSOR:
        missing = {"_raise_exceptions_for_missing_entries": False}
        file = cached_file(found[1], name, revision=tuned.job.model.revision, **missing)
        if file is not None:
            shutil.copyfile(file, folder / name)


def name_in_image_text(tuned: TunedRun, base: Path, folder: Path) -> None:
    """Gives an exported adapter the names of its layers in the image-text model that its base is, if it is one.

    The layers are named in full, as the image encoder may have layers of the same last name.
    """
    assert tuned.job.model is not None
    found = image_text_files(tuned.job.model, base)
    state = load_file(folder / WEIGHTS)
    if found is None or not all(key.startswith(PREFIX) for key in state):
        return
    config, where, _ = found
    around = ImageText.around(unwrap(tuned.model), config, tuned.job.model, where)
    state = {f"{PREFIX}{around.name(key.removeprefix(PREFIX))}": tensor for key, tensor in state.items()}
    save_file(state, folder / WEIGHTS, metadata={"format": "pt"})
    peft: Any = LoraConfig.from_pretrained(str(folder))
    peft.target_modules = {matched[1] for key in state if (matched := FACTORS.fullmatch(key))}
    for key in ("target_parameters", "modules_to_save"):
        setattr(peft, key, [around.name(name) for name in getattr(peft, key) or ()] or None)
    for key in ("rank_pattern", "alpha_pattern"):
        setattr(peft, key, {around.name(name): value for name, value in getattr(peft, key).items()})
    peft.save_pretrained(str(folder))
