"""Sources of parameter values, of which each process reads its own part."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from stoker.models.init_weights import initial_adapter
from stoker.models.split_fused import ParameterSource

Rows = tuple[slice, ...]
"""One slice with a start and a stop for each dimension of a whole tensor."""


class WeightSource(Protocol):
    """Reads parts of whole tensors, by their names in a model."""

    def read(self, name: str, rows: Rows) -> Tensor:
        """Returns the part ``rows`` of a tensor, on the CPU, in the stored type; it may be a view.

        Raises:
            UserError: it cannot be read.
        """
        ...


@torch.no_grad()
def fill(wanted: Iterable[tuple[str, Rows, Tensor]], source: WeightSource) -> None:
    """Reads parts of tensors (name, rows, memory) one by one; casts to the type of the memory.

    Raises:
        UserError: something cannot be read.
    """
    for name, rows, into in wanted:
        if into.numel():  # a process may hold no row of a small tensor
            into.copy_(source.read(name, rows))


def all_rows(shape: Iterable[int]) -> Rows:
    """Returns the `Rows` of a whole tensor."""
    return tuple(slice(0, size) for size in shape)


def fill_whole(parameters: Mapping[str, nn.Parameter], source: WeightSource) -> None:
    """Fills parameters that are not split.

    Raises:
        UserError: something cannot be read.
    """
    fill(((name, all_rows(p.shape), p.data) for name, p in parameters.items()), source)


class InMemoryWeights:
    """Whole tensors in memory."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def read(self, name: str, rows: Rows) -> Tensor:
        return self._tensors[name][rows]


def plain_name(name: str) -> str:
    """Returns the name of a parameter in the model without adapters."""
    return re.sub(r"\.base_layer(?=\.)", "", name.removeprefix("base_model.model."))


@dataclass(frozen=True)
class Assembled:
    """A model's weights by their names in training: with split fused layers and adapters.

    Attributes:
        base: the weights by transformers' names.
        shapes: of the model's parameters before sharding, by their names in training.
        seed: of the initial values of adapters.
        parts: of fused layers, by their names in training without adapters.
        transposed: names of the matrices that are stored as (inputs, outputs).
        drawn: initial values of parameters that tuning adds, by name.
    """

    base: WeightSource
    shapes: Mapping[str, torch.Size]
    seed: int
    parts: Mapping[str, ParameterSource] = field(default_factory=dict)
    transposed: frozenset[str] = frozenset()
    drawn: Mapping[str, Callable[[], Tensor]] = field(default_factory=dict)

    def read(self, name: str, rows: Rows) -> Tensor:
        """See `WeightSource`."""
        if name in self.drawn:
            return self.drawn[name]()[rows]
        if ".lora_magnitude_vector." in name:
            return self._magnitudes(name.split(".lora_magnitude_vector.", maxsplit=1)[0], rows[0])
        if ".lora_" in name:
            return initial_adapter(name, self.shapes[name], self.seed)[rows]
        name = plain_name(name)
        part = self.parts.get(name)
        if part is None:
            return self.base.read(name, rows)
        if part.rows is not None:
            first = part.rows[0]
            rows = (slice(first + rows[0].start, first + rows[0].stop), *rows[1:])
        if part.transposed:
            return self.base.read(part.name, rows[::-1]).T
        return self.base.read(part.name, rows)

    def _magnitudes(self, layer: str, rows: slice) -> Tensor:
        """DoRA's first magnitudes: the norm of each output's weights (Liu et al., 2024, section 4)."""
        name = f"{layer}.base_layer.weight"
        outputs, inputs = 0, 1
        if name in self.transposed:
            outputs, inputs = 1, 0
        part = list(all_rows(self.shapes[name]))
        part[outputs] = rows
        return self.read(name, tuple(part)).float().norm(dim=inputs)
