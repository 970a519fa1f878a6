"""Rows as tensors: every trained token is a target once, from the position before it, in either layout."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.models.attention.collate import (
    Row,
    common_prefixes,
    cut_after_last_target,
    groups_by_length,
    pack,
    pad,
    pad_with_document,
)

CPU = torch.device("cpu")


@st.composite
def some_rows(draw: st.DrawFn) -> list[Row]:
    """Rows over few tokens, so that many begin alike; each has a trained token behind its first."""
    rows = []
    for _ in range(draw(st.integers(1, 5))):
        beginning = [1, 2, 3, 4, 5, 6, 7, 8, 9] * draw(st.integers(0, 2))
        ids = beginning + draw(st.lists(st.integers(0, 3), min_size=2, max_size=12))
        trained = np.array(draw(st.lists(st.booleans(), min_size=len(ids), max_size=len(ids))))
        trained[draw(st.integers(1, len(ids) - 1))] = True
        rows.append((np.array(ids, dtype=np.uint32), trained))
    return rows


def wanted(rows: list[Row]) -> list[tuple[tuple[int, ...], int]]:
    """For every trained token, the tokens before it in its document, and itself."""
    return sorted(
        (tuple(map(int, ids[:i])), int(ids[i])) for ids, trained in rows for i in np.flatnonzero(trained) if i
    )


@settings(max_examples=200, deadline=None)
@given(some_rows())
def test_a_packed_row_predicts_every_trained_token_from_its_own_document(rows: list[Row]) -> None:
    for share in (False, True):
        inputs = pack(rows, CPU, share=share)
        assert inputs.segments is not None and inputs.positions is not None
        ids, context = inputs.ids[0].tolist(), {}
        for s in inputs.segments:
            before = ids[s.prefix_start : s.prefix_start + s.prefix_length]
            own = ids[s.start : s.start + s.length]
            for i in range(s.length):
                context[s.start + i] = (*before, *own[: i + 1])
                assert int(inputs.positions[0, s.start + i]) == len(before) + i
        predicted = zip(inputs.predict.tolist(), inputs.targets.tolist(), strict=True)
        assert sorted((context[at], target) for at, target in predicted) == wanted(rows)
        assert sum(s.length for s in inputs.segments) == len(ids)
        assert inputs.tokens == sum(len(ids) for ids, _ in rows)


@settings(max_examples=100, deadline=None)
@given(some_rows())
def test_padded_rows_predict_every_trained_token(rows: list[Row]) -> None:
    inputs = pad(rows, CPU)
    length = inputs.ids.shape[1]
    found = []
    for at, target in zip(inputs.predict.tolist(), inputs.targets.tolist(), strict=True):
        row, i = divmod(at, length)
        assert inputs.mask is None or inputs.mask[row, : i + 1].all()  # neither it nor what is before it is padding
        found.append((tuple(inputs.ids[row, : i + 1].tolist()), target))
    assert sorted(found) == wanted(rows)
    assert length == max(len(cut_after_last_target(row)[0]) for row in rows) - 1  # a last token is only a target
    assert inputs.mask is None or int(inputs.mask.sum()) == sum(len(cut_after_last_target(r)[0]) - 1 for r in rows)


@settings(max_examples=100, deadline=None)
@given(some_rows())
def test_groups_keep_every_row_and_little_padding(rows: list[Row]) -> None:
    lengths = [len(ids) for ids, _ in rows]
    groups = groups_by_length(lengths)
    assert sorted(i for group in groups for i in group) == list(range(len(rows)))
    for group in groups:
        assert max(lengths[i] for i in group) * len(group) <= 1.25 * sum(lengths[i] for i in group)


def test_a_common_beginning_stands_once() -> None:
    beginning = list(range(10, 30))
    documents = [np.array([*beginning, *rest]) for rest in ([1, 2, 3], [1, 4], [5])]
    alone = np.array([7] * 12)
    groups = common_prefixes([cut_after_last_target((ids, np.ones(len(ids), bool)))[0] for ids in (*documents, alone)])
    assert groups == [([0, 1, 2], len(beginning)), ([3], 0)]


def test_what_follows_the_last_trained_token_is_not_computed() -> None:
    ids, trained = np.arange(10), np.zeros(10, bool)
    trained[4] = True
    assert pack([(ids, trained)], CPU, share=False).ids.tolist() == [[0, 1, 2, 3]]


def test_a_filler_longer_than_the_row_has_no_positions_beyond_it() -> None:
    inputs = pack([(np.arange(5, dtype=np.uint32), np.ones(5, dtype=bool))], CPU, share=False)
    longer = pad_with_document(inputs, 40)
    assert inputs.positions is not None and longer.positions is not None and longer.segments is not None
    assert longer.ids.shape == longer.positions.shape == (1, 40)
    assert longer.positions.max() == inputs.positions.max()
    assert (longer.segments[-1].start, longer.segments[-1].length) == (4, 36)


@pytest.mark.parametrize(
    ("trained", "span"),
    [
        ([[1, 1, 1, 1], [1, 1, 1]], slice(0, 5)),  # pre-training: every position of the row
        ([[0, 0, 1, 1]], slice(1, 3)),
        ([[0, 0, 0, 1, 1]], None),  # an answer
        ([[0, 0, 1, 1], [0, 0, 1]], None),
        ([[0, 0, 0]], None),
    ],
)
def test_consecutive_positions_are_a_view_with_the_same_gradient(trained: list[list[int]], span: slice | None) -> None:
    rows = [(np.arange(len(row), dtype=np.uint32), np.array(row, bool)) for row in trained]
    inputs = pack(rows, CPU, share=False)
    assert inputs.span == span
    for laid_out in (inputs, pad(rows, CPU)):
        states = torch.randn(*laid_out.ids.shape, 4, dtype=torch.float64, requires_grad=True)
        chosen, expected = laid_out.predicting(states), states.flatten(0, 1)[laid_out.predict]
        assert torch.equal(chosen, expected) and (chosen._base is not None) == (laid_out.span is not None)
        weights = torch.randn_like(chosen)
        grads = [torch.autograd.grad((x * weights).sum(), states)[0] for x in (chosen, expected)]
        assert torch.equal(*grads)
