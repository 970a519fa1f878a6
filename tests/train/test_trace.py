"""How far two runs are apart: whatever is not the same must be found and named."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from stoker.train.trace import Trace, compare

BOUND = 1e-10
TRACE = Trace(
    losses=(6.0, 5.0),
    grad_norms=(2.0, 1.0),
    gradients={"step 1: a": torch.tensor([0.1, 0.2]), "step 1: b": torch.tensor([3.0])},
    weights={"a": torch.tensor([100.0, 0.0]), "b": torch.tensor([0.5])},
)


def test_the_same_passes() -> None:
    assert compare(TRACE, TRACE).first_beyond(BOUND) is None


def test_differences_are_relative_to_what_is_large() -> None:
    moved = replace(TRACE, weights={**TRACE.weights, "a": torch.tensor([100.0, 1e-9], dtype=torch.float64)})
    found = compare(moved, TRACE).weight
    assert found.size == pytest.approx(1e-11) and found.where == "a"
    moved = replace(TRACE, weights={**TRACE.weights, "b": torch.tensor([0.5 + 1e-3])})
    assert compare(moved, TRACE).weight.size == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (replace(TRACE, losses=(6.0, 5.1)), "the loss of step 2"),
        (replace(TRACE, losses=(6.0,)), "the loss of step 2"),
        (replace(TRACE, losses=(math.nan, 5.0)), "the loss of step 1"),
        (replace(TRACE, grad_norms=(2.0, 1.01)), "the gradient norm of step 2"),
        (replace(TRACE, gradients={**TRACE.gradients, "step 1: b": torch.tensor([3.1])}), "the gradient of step 1: b"),
        (replace(TRACE, gradients={"step 1: a": TRACE.gradients["step 1: a"]}), "step 1: b (only one process has it)"),
        (replace(TRACE, weights={**TRACE.weights, "c": torch.ones(1)}), "the weight c (only the layout has it)"),
        (replace(TRACE, weights={**TRACE.weights, "a": torch.ones(3)}), "the weight a (shape (3,), not (2,))"),
        (replace(TRACE, weights={**TRACE.weights, "a": torch.tensor([math.nan, 0])}), "the weight a differs by nan"),
    ],
)
def test_what_differs_is_named(wrong: Trace, named: str) -> None:
    assert named in (compare(wrong, TRACE).first_beyond(BOUND) or "")
