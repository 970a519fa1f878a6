"""LoRA on stacked experts by grouped products.

peft adds the product of the factors to the tensor of all experts before each pass, and autograd keeps this copy. Here
rows are multiplied with the experts and, one after another, with the factors. The mathematics, the parameters and the
file format are peft's.

Shapes: E experts, I input width, O output width, R rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor

ALIGNED = 8  # torch's grouped products need rows of a multiple of 16 bytes, and those may have 16-bit numbers


@dataclass(frozen=True)
class AdaptedExperts:
    """A tensor of experts' matrices plus ``scaling * left @ right``, at the place of the parameter.

    Attributes:
        weight: shape (E, I, O), or (E, O, I).
        left, right: shapes (E, I, R) and (E, R, O), or (E, O, R) and (E, R, I).
    """

    weight: Tensor
    left: Tensor
    right: Tensor
    scaling: float

    @property
    def dtype(self) -> torch.dtype:
        """The type of the matrices."""
        return self.weight.dtype

    def transpose(self, first: int, second: int) -> AdaptedExperts:
        """Returns a view with the last two dimensions exchanged."""
        weight, left, right = (each.transpose(first, second) for each in (self.weight, self.left, self.right))
        return replace(self, weight=weight, left=right, right=left)

    def __getitem__(self, index: Any) -> Tensor:
        """Returns the adapted matrices of some experts."""
        return self.weight[index] + self.scaling * self.left[index] @ self.right[index]


def multiply_by_parts(wrapper: ParamWrapper) -> None:
    """Has the experts below peft's wrapper multiply with the factors, if the rank is a multiple of 8."""
    wrapper._activate_lora = partial(_activated, wrapper)  # type: ignore[method-assign]


@contextmanager
def _activated(wrapper: Any, active: Sequence[str]) -> Iterator[None]:
    names = [name for name in active if name in wrapper.lora_A]
    experts, key = wrapper.get_base_layer(), wrapper.parameter_name
    if len(names) != 1 or wrapper.num_experts == 1 or not _is_aligned(wrapper, names[0]):
        with type(wrapper)._activate_lora(wrapper, active):
            yield
        return
    # In the place of the parameter, which stays registered under its name.
    vars(experts)[key] = AdaptedExperts(wrapper.get_param(), *wrapper.get_delta_factors(names[0]))
    try:
        yield
    finally:
        del vars(experts)[key]


def _is_aligned(wrapper: Any, name: str) -> bool:
    return wrapper.get_param().dtype == torch.float64 or wrapper.r[name] % ALIGNED == 0
