"""Writes the model and the tokenizer of a folder as a GGUF file."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from stoker.checkpoint.export.gguf_writer import write_gguf


def gguf_of_folder(folder: Path, target: Path, *, dtype: Any = "f16", stops: Collection[int] = ()) -> None:
    """Writes the GGUF file ``target``, with the folder's name."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    write_gguf(model, AutoTokenizer.from_pretrained(folder), target, dtype=dtype, name=folder.name, stops=stops)
