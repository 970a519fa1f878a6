"""Packing: whole documents, full bins, and nothing that hangs on what was packed before."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.data.pack import best_fit, pack_window

LENGTHS = st.lists(st.integers(min_value=1, max_value=64), max_size=300)


@given(lengths=LENGTHS, key=st.integers(0, 2**32))
def test_every_document_is_packed_once_and_no_bin_overflows(lengths: list[int], key: int) -> None:
    bins = pack_window(lengths, 64, key)
    assert sorted(i for one in bins for i in one) == list(range(len(lengths)))
    assert all(0 < sum(lengths[i] for i in one) <= 64 for one in bins)
    assert bins == pack_window(lengths, 64, key)


@given(lengths=LENGTHS)
def test_no_two_bins_would_fit_into_one(lengths: list[int]) -> None:
    """A bin is opened only for a document that fits none of the open ones."""
    fill = sorted(sum(lengths[i] for i in one) for one in best_fit(lengths, 64))
    assert len(fill) < 2 or fill[0] + fill[1] > 64


def test_a_known_packing() -> None:
    bins = best_fit([6, 5, 4, 3, 2], 10)
    assert sorted(sorted(one) for one in bins) == [[0, 2], [1, 3, 4]]


def test_short_documents_leave_little_empty() -> None:
    lengths = [20 + (i * 37) % 200 for i in range(1024)]
    bins = best_fit(lengths, 512)
    assert sum(lengths) / (512 * len(bins)) > 0.98


def test_a_document_that_does_not_fit_is_an_error() -> None:
    with pytest.raises(ValueError, match="65 tokens does not fit a sequence of 64"):
        best_fit([3, 65], 64)


def test_long_documents_are_packed_first_and_sequences_are_shuffled() -> None:
    assert len(best_fit([2, 3, 4, 5, 6], 10)) == 2
    packed = pack_window([60] * 50, 64, 7)
    assert packed != sorted(packed) and packed != pack_window([60] * 50, 64, 8)
