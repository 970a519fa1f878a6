"""Reads an export's weights back and compares them one by one with the trained ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from stoker.checkpoint.export.gguf_changes import PLUS_ONE, TRANSPOSED, joined
from stoker.checkpoint.export.gguf_families import FAMILIES
from stoker.checkpoint.export.gguf_layout import stored_tensors
from stoker.checkpoint.export.rounding import check_stored
from stoker.errors import RunFailed
from stoker.models.tuning.quantise import unpacker

GGUF_FORMS = {"F32": "fp32", "F16": "fp16"} | {kind: kind.lower() for kind in ("Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0")}


class Stored(NamedTuple):
    """A weight that was read back.

    Attributes:
        name: transformers' name.
        form: as of `largest_rounding`.
        transposed: whether weights of a column share a scale, as the file has the matrix transposed.
    """

    name: str
    value: Tensor
    form: str
    transposed: bool = False


@torch.no_grad()
def take_stored(model: nn.Module, stored: Iterable[Stored]) -> None:
    """Checks every stored weight against a model's own, and copies it into the model.

    Args:
        model: the trained model in transformers' form.
        stored: all weights.

    Raises:
        RunFailed: a weight differs by more than the rounding of its form, is missing, or is not in the model.
    """
    left = dict(model.named_parameters())
    for name, value, form, transposed in stored:
        if name not in left:
            raise RunFailed(f"the export differs: it holds {name}, which the trained model has not")
        parameter = left.pop(name)
        pair = (parameter.t(), value.t()) if transposed else (parameter, value)
        check_stored(name, *pair, form)
        parameter.copy_(value)
    if left:
        raise RunFailed(f"the export differs: it lacks {next(iter(left))}")


def stored_in_folder(model: Any, folder: Path, dtype: str) -> Iterator[Stored]:
    """Yields the weights that transformers reads from a folder, written in ``dtype``, for a model's class."""
    held = type(model).from_pretrained(folder, dtype="auto", local_files_only=True)
    for name, parameter in held.named_parameters():
        yield Stored(name, parameter.detach(), dtype)


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


def stored_in_gguf(model: Any, file: Path) -> Iterator[Stored]:
    """Yields the weights of a GGUF file, by transformers' names."""
    from gguf.quants import dequantize

    from stoker.plan.shapes.gguf_reader import BoundedGGUFReader

    tensors = {tensor.name: tensor for tensor in BoundedGGUFReader(file).tensors}
    tensors.pop("rope_freqs.weight", None)  # part of the configuration
    for stored in stored_tensors(model, FAMILIES[type(model).__name__]):
        parts = [tensors.pop(name) for name in stored.names if name in tensors]
        if len(parts) < len(stored.names):
            continue  # `take_stored` reports what is missing
        values = [torch.from_numpy(dequantize(part.data, part.tensor_type).copy()) for part in parts]
        if stored.change is not None:
            values = [stored.change.from_gguf(value, model.config) for value in values]
        form = "fp32+1" if stored.change is PLUS_ONE else GGUF_FORMS[parts[0].tensor_type.name]
        yield Stored(stored.key, joined(values), form, transposed=stored.change is TRANSPOSED)
    for name, tensor in tensors.items():
        yield Stored(name, torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy()), "fp32")
