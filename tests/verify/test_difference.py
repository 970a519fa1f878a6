"""How far two runs are apart: whatever is not the same must be found, and what differs first be named."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from stoker.verify.difference import Computed, compare

BOUND = 1e-10
RUN = Computed(
    numbers={
        (0, "evaluation loss"): 7.0,
        (1, "loss"): 6.0,
        (1, "gradient norm"): 2.0,
        (1, "learning rate"): 0.1,
        (2, "loss"): 5.0,
        (2, "gradient norm"): 1.0,
        (2, "learning rate"): 0.2,
        (2, "evaluation loss"): 4.0,
    },
    gradients={(1, "a"): torch.tensor([0.1, 0.2]), (1, "b"): torch.tensor([3.0])},
    weights={"a": torch.tensor([100.0, 0.0]), "b": torch.tensor([0.5])},
)


def with_number(step: int, name: str, value: float) -> Computed:
    return replace(RUN, numbers={**RUN.numbers, (step, name): value})


def test_the_same_passes() -> None:
    found = compare(RUN, RUN)
    assert found.first_beyond(BOUND) is None
    assert RUN.losses == (6.0, 5.0) and RUN.grad_norms == (2.0, 1.0)
    assert set(found.as_json().values()) == {0.0}


def test_differences_are_relative_to_what_is_large() -> None:
    moved = replace(RUN, weights={**RUN.weights, "a": torch.tensor([100.0, 1e-9], dtype=torch.float64)})
    found = compare(moved, RUN).largest["weight"]
    assert found.size == pytest.approx(1e-11) and "the weight a" in found.where
    moved = replace(RUN, weights={**RUN.weights, "b": torch.tensor([0.5 + 1e-3])})
    assert compare(moved, RUN).size("weight") == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (with_number(2, "loss", 5.1), "the loss of step 2 differs by 2.00e-02"),
        (replace(RUN, numbers={k: v for k, v in RUN.numbers.items() if k[0] < 2}), "the loss of step 2: one of them"),
        (with_number(1, "loss", math.nan), "the loss of step 1 differs by nan"),
        (with_number(2, "gradient norm", 1.01), "the gradient norm of step 2"),
        (with_number(2, "learning rate", 0.3), "the learning rate of step 2"),
        (with_number(0, "evaluation loss", 7.1), "the evaluation loss after step 0"),
        (replace(RUN, gradients={**RUN.gradients, (1, "b"): torch.tensor([3.1])}), "the gradient of b in step 1"),
        (replace(RUN, gradients={(1, "a"): RUN.gradients[1, "a"]}), "the gradient of b in step 1: only the other"),
        (replace(RUN, weights={**RUN.weights, "c": torch.ones(1)}), "the weight c after the last step: only this run"),
        (replace(RUN, weights={**RUN.weights, "a": torch.ones(3)}), "the weight a after the last step has the shape"),
        (replace(RUN, weights={**RUN.weights, "a": torch.tensor([math.nan, 0])}), "the weight a after the last step"),
    ],
)
def test_what_differs_is_named(wrong: Computed, named: str) -> None:
    assert named in (compare(wrong, RUN).first_beyond(BOUND) or "")


def test_the_first_difference_is_named_and_not_the_largest() -> None:
    numbers = {**RUN.numbers, (1, "learning rate"): 0.2, (2, "loss"): 50.0, (2, "evaluation loss"): 90.0}
    wrong = replace(RUN, numbers=numbers, weights={"a": RUN.weights["a"] + 9, "b": RUN.weights["b"]})
    found = compare(wrong, RUN)
    assert "the learning rate of step 1" in (found.first_beyond(BOUND) or "")
    assert found.size("loss") == pytest.approx(9.0)


def test_a_run_that_went_on_is_compared_from_there() -> None:
    later = replace(RUN, numbers={k: v for k, v in RUN.numbers.items() if k[0] > 1}, gradients={})
    assert compare(later, RUN, after=1).first_beyond(BOUND) is None
    assert compare(later, RUN).first_beyond(BOUND) is not None


def test_some_parameters_can_be_left_out() -> None:
    other = replace(RUN, weights={"b": RUN.weights["b"], "layer.c": torch.ones(2)})
    assert compare(other, RUN, without=["a", "layer."]).first_beyond(BOUND) is None
