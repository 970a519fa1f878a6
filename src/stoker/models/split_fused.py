"""Splits fused layers into one linear layer for each matrix, in every layout.

Tensor parallelism cannot split the rows of a layer that concatenates queries, keys and values: a process would get
queries only. So such layers are split when the model is built, also for one process, and LoRA, checkpoints and layouts
see the same parameters everywhere. Files do not change: `ParameterSource` says where a part is stored, and `join_fused`
restores the model that transformers saves.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from transformers.pytorch_utils import Conv1D

from stoker.models.families.facts import Family, Fused, submodule


@dataclass(frozen=True)
class ParameterSource:
    """The source of a split model's parameter in the model's own checkpoint.

    Attributes:
        name: of the tensor on disk (a name of the unsplit model).
        rows: (start, stop) of the outputs of the fused layer; None for all of them.
        transposed: whether the matrix on disk is (inputs, outputs), so that the rows are its columns.
    """

    name: str
    rows: tuple[int, int] | None
    transposed: bool


class Parts(nn.Module):
    """Layers in the place of a fused one; concatenates their outputs."""

    @property
    def weight(self) -> Tensor:
        """The weights of all parts, for code that reads them (the convolutions of linear attention)."""
        return torch.cat([part.weight for part in self.children()])  # type: ignore[misc]  # tensors

    @property
    def bias(self) -> Tensor | None:
        """Their biases; None without."""
        found: list[Any] = [part.bias for part in self.children()]
        return None if found[0] is None else torch.cat(found)

    def forward(self, x: Tensor) -> Tensor:
        """Shape (..., inputs) to (..., outputs of all parts)."""
        return torch.cat([part(x) for part in self.children()], dim=-1)


def split_fused(model: nn.Module, family: Family) -> dict[str, ParameterSource]:
    """Splits the fused layers of a causal language model in place, and converts transposed layers to ordinary ones.

    Must come before adapters are inserted and before sharding. Works on the meta device too.

    Returns:
        The source of each new parameter on disk, by its name. Others are stored under their own names.
    """
    sources: dict[str, ParameterSource] = {}
    for path, layer, rows, transposed in _layers(model, family):
        pieces = [_part(layer, span, transposed) for span in rows.values()]
        new: nn.Module = pieces[0]
        if rows.keys() != {""}:
            new = Parts()
            for part, piece in zip(rows, pieces, strict=True):
                new.add_module(part, piece)
        model.set_submodule(path, new)
        for part, span in rows.items():
            inside = f"{path}.{part}" if part else path
            for key in ("weight", "bias") if layer.bias is not None else ("weight",):
                sources[f"{inside}.{key}"] = ParameterSource(f"{path}.{key}", span, transposed and key == "weight")
    return sources


def join_fused(model: nn.Module, family: Family) -> None:
    """Reverses `split_fused`, in place: the model has the names and shapes that transformers saves.

    Layers that are in that form already are unchanged.
    """
    for path, layer, _, transposed in _layers(model, family):
        if isinstance(layer, Conv1D):
            continue
        weight_OI, bias_O = layer.weight, layer.bias
        with torch.device("meta"):
            new: Any = Conv1D(*weight_OI.shape) if transposed else _blank(weight_OI, bias_O)
        model.set_submodule(path, _filled(new, weight_OI.T.contiguous() if transposed else weight_OI, bias_O))


def saved_tensors(model: nn.Module, family: Family | None, path: str) -> dict[str, Tensor]:
    """Returns the tensors of a module of a split model, by the names and in the shapes that transformers saves."""
    split = {} if family is None else {name: (layer, flat) for name, layer, _, flat in _layers(model, family)}
    inside = {name: found for name, found in split.items() if f"{name}.".startswith(f"{path}.")}
    below = tuple(f"{name}." for name in inside)
    state = model.get_submodule(path).state_dict(prefix=f"{path}.")
    tensors = {name: tensor for name, tensor in state.items() if not name.startswith(below)}
    for name, (layer, transposed) in inside.items():
        weight, bias = layer.weight, layer.bias
        tensors[f"{name}.weight"] = weight.T if transposed else weight
        tensors |= {} if bias is None else {f"{name}.bias": bias}
    whole = torch.contiguous_format
    return {name: tensor.detach().cpu().clone(memory_format=whole) for name, tensor in tensors.items()}


def _layers(model: nn.Module, family: Family) -> Iterator[tuple[str, Any, dict[str, tuple[int, int] | None], bool]]:
    """(path, layer, rows of each part, stored as (inputs, outputs)) of every layer that is stored differently."""
    fused, transposed = {f.path: f for f in family.fused}, family.transposed
    for index, block in model.get_submodule(family.blocks).named_children():
        for path in dict.fromkeys((*fused, *transposed)):
            layer = submodule(block, path)
            if layer is not None:
                yield f"{family.blocks}.{index}.{path}", layer, _rows(fused.get(path), model.config), path in transposed


def _rows(fused: Fused | None, config: Any) -> dict[str, tuple[int, int] | None]:
    """(start, stop) of each part; None under an empty name for a layer that is only transposed."""
    if fused is None:
        return {"": None}
    rows: dict[str, tuple[int, int] | None] = {}
    start = 0
    for part, size in zip(fused.parts, fused.sizes(config), strict=True):
        rows[part] = (start, start + size)
        start += size
    return rows


def _part(layer: Any, rows: tuple[int, int] | None, transposed: bool) -> nn.Module:
    """Returns a part of a stored layer, with its own memory."""
    span = slice(None) if rows is None else slice(*rows)
    weight = layer.weight.detach().T if transposed else layer.weight.detach()
    bias = None if layer.bias is None else layer.bias.detach()[span].clone()
    weight_OI = weight[span].clone(memory_format=torch.contiguous_format)
    return _filled(_blank(weight_OI, bias), weight_OI, bias, trained=layer.weight.requires_grad)


def _blank(weight: Tensor, bias_O: Tensor | None) -> nn.Module:
    """Returns a linear layer, or a causal convolution of single channels, without memory."""
    outputs, inputs, *kernel = weight.shape
    if not kernel:
        return nn.Linear(inputs, outputs, bias=bias_O is not None, device="meta")
    size, biased = kernel[0], bias_O is not None
    return nn.Conv1d(outputs, outputs, size, groups=outputs, padding=size - 1, bias=biased, device="meta")


def _filled(layer: Any, weight: Tensor, bias: Tensor | None, *, trained: bool = True) -> Any:
    layer.weight = Parameter(weight.detach(), requires_grad=trained)
    if bias is not None:
        layer.bias = Parameter(bias.detach(), requires_grad=trained)
    return layer
