"""Reads an export's weights back and compares them one by one with the trained ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stoker.checkpoint.export.gguf_layout import FAMILIES, rotated_heads, tensor_name
from stoker.checkpoint.export.rounding import check_stored
from stoker.errors import RunFailed
from stoker.models.tuning.quantise import unpacker

GGUF_FORMS = {"F32": "fp32", "F16": "fp16", "Q8_0": "q8_0"}
Stored = Iterator[tuple[str, Tensor, str]]


@torch.no_grad()
def take_stored(model: nn.Module, stored: Stored) -> None:
    """Checks every stored weight against a model's own, and copies it into the model.

    Args:
        model: the trained model in transformers' form.
        stored: name, value and form of each weight.

    Raises:
        RunFailed: a weight differs by more than the rounding of its form, is missing, or is not in the model.
    """
    left = dict(model.named_parameters())
    for name, value, form in stored:
        if name not in left:
            raise RunFailed(f"the export differs: it holds {name}, which the trained model has not")
        parameter = left.pop(name)
        check_stored(name, parameter, value, form)
        parameter.copy_(value)
    if left:
        raise RunFailed(f"the export differs: it lacks {next(iter(left))}")


def stored_in_folder(model: Any, folder: Path, dtype: str) -> Stored:
    """Yields the weights that transformers reads from a folder, written in ``dtype``, for a model's class."""
    held = type(model).from_pretrained(folder, dtype="auto", local_files_only=True)
    for name, parameter in held.named_parameters():
        yield name, parameter.detach(), dtype


def check_quantised_weights(trained: nn.Module, held: nn.Module, form: str, dtype: str) -> None:
    """Checks a quantised model against its original.

    Raises:
        RunFailed: a weight differs by more than the rounding of its form.
    """
    layers = dict(held.named_modules())
    others = dict(held.named_parameters())
    for name, parameter in trained.named_parameters():
        layer = layers[name.rpartition(".")[0]]
        unpack = unpacker(layer) if name.endswith(".weight") else None
        with torch.no_grad():
            value = unpack() if unpack is not None else others[name]
            check_stored(name, parameter.detach(), value, form if unpack is not None else dtype)


def stored_in_gguf(model: Any, file: Path) -> Stored:
    """Yields the weights of a GGUF file, by transformers' names."""
    from gguf.quants import dequantize

    from stoker.plan.shapes.gguf_reader import BoundedGGUFReader

    family = FAMILIES[type(model).__name__]
    name_of = tensor_name(model.config, family)
    ours = {str(name_of(name)): name for name, _ in model.named_parameters()}
    for tensor in BoundedGGUFReader(file).tensors:
        if tensor.name == "rope_freqs.weight":  # part of the configuration
            continue
        value = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        if count := rotated_heads(tensor.name, model.config, family):
            value = _halves(value, count)
        yield ours.get(tensor.name, tensor.name), value, GGUF_FORMS[tensor.tensor_type.name]


def _halves(weight_OI: Tensor, heads: int) -> Tensor:
    """Reorders the rows of each head from pairs to halves, transformers' order; see `gguf_writer`."""
    rows, width = weight_OI.shape
    return weight_OI.view(heads, rows // heads // 2, 2, width).transpose(1, 2).reshape(rows, width)
