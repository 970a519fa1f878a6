"""Dropout masks of processes: what is wrong with them is named, and what a layout requires is not."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from stoker.job.layout import Layout
from stoker.verify.dropout_masks import Draw, problem_of, record_dropout_masks

RATES = frozenset({0.1})


def draw(step: int, state: str, content: str = "x", rate: float = 0.1) -> Draw:
    return Draw(step, rate, state.encode(), content.encode())


@pytest.mark.parametrize(
    ("ranks", "layout", "problem"),
    [
        ([[draw(1, "a"), draw(2, "b")]], Layout(), None),
        ([[]], Layout(), "nothing is dropped"),
        ([[draw(1, "a", rate=0.5)]], Layout(), "0.5 of something is dropped, and the job drops 0.1"),
        ([[draw(0, "a")]], Layout(), "while the model is evaluated"),
        ([[draw(1, "a"), draw(1, "a")]], Layout(), None),  # recomputed in the backward pass
        ([[draw(1, "a"), draw(2, "a")]], Layout(), "process 0 draws the same numbers in two steps"),
        ([[draw(1, "a")], [draw(1, "b")]], Layout(data=2), None),
        ([[draw(1, "a")], [draw(1, "a")]], Layout(data=2), "the processes 0 and 1 draw the same numbers in step 1"),
        ([[draw(1, "a")], [draw(1, "a")]], Layout(tensor=2), None),
        ([[draw(1, "a")], [draw(1, "b")]], Layout(tensor=2), "drop other parts of the same tensor in step 1"),
        ([[draw(1, "a")], [draw(1, "b")]], Layout(tensor=2, sequence=True), None),
        ([[draw(1, "a", "x")], [draw(1, "a", "y")]], Layout(tensor=2), "the same parts of different tensors in step 1"),
        ([[draw(1, "a")], [draw(1, "a"), draw(1, "b")]], Layout(tensor=2), "draw 1 and 2 masks"),
        (
            [[draw(1, "a")], [draw(1, "a")], [draw(1, "a")], [draw(1, "a")]],
            Layout(data=2, tensor=2),
            "the processes 0 and 2 draw the same numbers in step 1",
        ),
        (
            [[draw(1, "a")], [draw(1, "a")], [draw(1, "b")], [draw(1, "c")]],
            Layout(data=2, tensor=2),
            "the processes 2 and 3, which share each matrix, drop other parts of the same tensor",
        ),
    ],
)
def test_what_is_wrong_with_masks(ranks: list[list[Draw]], layout: Layout, problem: str | None) -> None:
    found = problem_of(ranks, layout, RATES)
    assert (found is None) == (problem is None) and (problem or "") in (found or "")


def test_masks_are_recorded_where_something_is_dropped() -> None:
    x = torch.ones(1, 1, 4, 8)
    with record_dropout_masks() as draws:
        F.dropout(x, 0.5, training=False)
        F.dropout(x, 0.0)
        F.scaled_dot_product_attention(x, x, x)
        assert not draws.made
        draws.step = 3
        F.dropout(x, 0.5)
        F.scaled_dot_product_attention(x, x, x, dropout_p=0.25)
    F.dropout(x, 0.5)
    assert [(made.step, made.rate) for made in draws.made] == [(3, 0.5), (3, 0.25)]
    assert draws.made[0].state != draws.made[1].state and draws.made[0].content == draws.made[1].content
