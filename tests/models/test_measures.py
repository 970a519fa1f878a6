"""Sums of an objective's measures."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from stoker.models.objective import Measures

INPUTS: Any = SimpleNamespace(counted_once=lambda x: x)


class Moved(TorchDispatchMode):
    """Records the copies from one device to another."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[Any] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and any(isinstance(x, Tensor) and x.device != out.device for x in args):
            self.copies.append(function)
        return out


def test_the_first_pass_of_a_step_copies_no_zeros_to_the_device() -> None:
    measures = Measures("loss", "right")
    with Moved() as moved, torch.device("meta"):
        for _ in range(2):
            measures.add(INPUTS, loss=torch.ones(()))
        sums = measures.take(torch.zeros(()))
    assert sums.shape == (2,) and sums.is_meta and not moved.copies


def test_sums_start_at_zero_after_they_are_taken() -> None:
    measures, like = Measures("loss", "right"), torch.zeros((), dtype=torch.float64)
    measures.add(INPUTS, loss=torch.tensor(2.0), right=torch.tensor(1.0))
    measures.add(INPUTS, loss=torch.tensor(3.0))
    assert measures.take(like).tolist() == [5.0, 1.0]
    assert measures.take(like).tolist() == [0.0, 0.0]
