"""Reads weights in safetensors files, in slices.

The mapping from stored tensors to parameters follows transformers' own loading rules: base-model prefixes, renamed
layers, experts that are stored one by one and stacked in the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    Transpose,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from stoker.errors import Problem, UserError, user_file_errors
from stoker.models.meta_model import name_groups, set_parameter
from stoker.models.weight_source import Rows, all_rows

COMPARED = 1 << 24  # elements that are compared at a time


@dataclass
class _Origin:
    """The stored tensors that make a tensor of the model.

    Attributes:
        name: of the tensor; of the first one, if they make several.
        keys: of the stored tensors, in order, by the converter's pattern that they match.
        converter: makes the tensor from them; None if it is stored unchanged.
    """

    name: str
    converter: WeightConverter | None
    keys: dict[str, list[str]] = field(default_factory=dict)

    @property
    def one(self) -> str:
        """The key of a tensor that is stored unchanged; the last of several."""
        return next(iter(self.keys.values()))[-1]

    @property
    def stacks(self) -> bool:
        """Returns whether each stored tensor is one index of the first dimension."""
        if self.converter is None:
            return False
        first, *others = self.converter.operations
        return (
            isinstance(first, MergeModulelist)
            and first.dim == 0
            and all(
                (isinstance(o, Concatenate) and o.dim > 0)
                or (isinstance(o, Transpose) and o.dim0 > 0 and o.dim1 > 0 and not o.check_dims)
                for o in others
            )
        )


class Stored:
    """The weights of a model in safetensors files.

    Each read maps its files again, so that pages of earlier reads do not stay in the process' memory.
    """

    def __init__(self, name: str, files: Sequence[Path], model: PreTrainedModel) -> None:
        """Finds every parameter and persistent buffer of a model in the files.

        Buffers get their stored values, and weights that the configuration ties but the files store separately are
        untied, as in transformers.

        Args:
            name: of the model, for messages.

        Raises:
            UserError: the files cannot be read, lack a parameter, or have it in another shape.
        """
        self._called, self._model = name, model
        self._parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        self._file_of: dict[str, Path] = {}
        self._shapes: dict[str, list[int]] = {}
        try:
            for file in files:
                with safe_open(file, "pt") as opened:
                    for key in opened.keys():  # noqa: SIM118 -- no dictionary
                        self._file_of[key] = file
                        self._shapes[key] = opened.get_slice(key).get_shape()
            self._origins = _origins(model, list(self._file_of))
            self._find_all()
        except (SafetensorError, OSError) as error:
            raise UserError(f"the model {name} cannot be loaded: {error}") from error

    def read(self, name: str, rows: Rows) -> Tensor:
        """See `WeightSource`; of experts that are stored one by one, only the requested ones are read."""
        origin = self._origins[name]
        try:
            if origin.converter is not None:
                read = self._converted(name, rows)
            else:
                with safe_open(self._file_of[origin.one], "pt") as opened:
                    read = opened.get_slice(origin.one)[rows] if rows else opened.get_tensor(origin.one)
        except (SafetensorError, OSError) as error:
            raise UserError(f"the model {self._called} cannot be loaded: {error}") from error
        if name in self._parameters:
            self._check_numbers(name, read)
        return read

    def _check_numbers(self, name: str, read: Tensor) -> None:
        """Refuses whole numbers without a scale, NaN and infinity."""
        if read.is_floating_point() and (read.itemsize == 1 or not read.numel()):
            return
        first = next(iter(self._origins[name].keys.values()))[0]
        where = f"{first} of the model {self._called}, in {self._file_of[first]},"
        if not read.is_floating_point():
            message = f"{where} contains integers ({read.dtype}), and config.json does not give their scale"
            raise UserError(Problem(message, "give the model as it was before it was quantised"))
        if not all(map(isfinite, torch.aminmax(read))):
            raise UserError(Problem(f"{where} is not finite: it contains NaN or infinity", "copy or save it again"))

    def _converted(self, name: str, rows: Rows) -> Tensor:
        origin = self._origins[name]
        converter = deepcopy(origin.converter)
        assert converter is not None
        some = rows[0] if origin.stacks else slice(None)
        wanted = [(pattern, key) for pattern, keys in origin.keys.items() for key in keys[some]]
        with ExitStack() as stack:
            files = {file: stack.enter_context(safe_open(file, "pt")) for file in {self._file_of[k] for _, k in wanted}}
            for pattern, key in wanted:
                converter.add_tensor(origin.name, key, pattern, files[self._file_of[key]].get_tensor(key))
            with user_file_errors(f"{origin.name} of the model {self._called}"):
                made = converter.convert(origin.name, model=self._model, config=self._model.config)[name]
        whole = made[0] if isinstance(made, list) else made
        return whole[slice(None), *rows[1:]] if origin.stacks else whole[rows]

    def _find_all(self) -> None:
        state = self._model.state_dict(keep_vars=True)
        for group in name_groups(self._model):
            found = [name for name in group if name in self._origins]
            if not found:
                raise UserError(f"{self._called} contains no weights for {group[0]}")
            if len(found) > 1 and not self._equal(found):
                for apart in found[1:]:
                    own = nn.Parameter(torch.empty_like(state[apart]), state[apart].requires_grad)
                    set_parameter(self._model, apart, own)
                    self._model.all_tied_weights_keys.pop(apart, None)
            for name in group:
                self._origins.setdefault(name, self._origins[found[0]])
                self._check_shape(name, state[name].shape)
        for name, buffer in self._model.named_buffers():
            if name in self._origins:
                buffer.copy_(self.read(name, all_rows(buffer.shape)))

    def _equal(self, names: list[str]) -> bool:
        """Returns whether the stored tensors of a tied parameter are equal, compared in parts."""
        first, *others = names
        size = self._model.state_dict()[first].shape
        step = max(1, COMPARED // max(1, size[1:].numel()))
        for start in range(0, size[0], step):
            rows = (slice(start, min(size[0], start + step)), *all_rows(size[1:]))
            if not all(torch.equal(self.read(first, rows), self.read(other, rows)) for other in others):
                return False
        return True

    def _check_shape(self, name: str, shape: torch.Size) -> None:
        origin = self._origins[name]
        if origin.converter is None and (stored := self._shapes[origin.one]) != list(shape):
            raise UserError(
                f"{self._called} holds {origin.one} in the shape {stored}, and its configuration asks for {list(shape)}"
            )


def _origins(model: PreTrainedModel, keys: list[str]) -> dict[str, _Origin]:
    """Returns the stored tensors of each tensor of a model, by its name."""
    state = model.state_dict()
    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    prefix = model.base_model_prefix
    origins: dict[str, _Origin] = {}
    for key in sorted(keys, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, state)
        if name not in state and key in state:
            name, pattern = rename_source_key(key, [], [], prefix, state)
        if name not in state:
            continue
        converter = by_pattern[pattern] if pattern is not None else None
        origin = origins.setdefault(name, _Origin(name, converter))
        origin.keys.setdefault(pattern or key, []).append(key)
        if converter is not None:
            for other in converter.target_patterns[1:]:
                origins[name.replace(converter.target_patterns[0], other)] = origin
    return origins
