"""The keyed shuffle: a bijection, even, and the same everywhere."""

from __future__ import annotations

from collections import Counter
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from stoker.data.order import permute, stream_key

KEYS = st.integers(min_value=0, max_value=2**64 - 1)


@settings(deadline=None, max_examples=60)
@given(size=st.integers(min_value=1, max_value=5000), key=KEYS)
def test_every_index_is_hit_once(size: int, key: int) -> None:
    assert np.array_equal(np.sort(permute(np.arange(size), size, key)), np.arange(size))


@settings(deadline=None, max_examples=40)
@given(size=st.integers(min_value=1, max_value=2**40), key=KEYS, data=st.data())
def test_one_index_alone_goes_where_it_goes_among_others(size: int, key: int, data: st.DataObject) -> None:
    some = data.draw(st.lists(st.integers(min_value=0, max_value=size - 1), min_size=1, max_size=20))
    together = permute(np.array(some), size, key)
    assert together.tolist() == [int(permute(index, size, key)[0]) for index in some]
    assert 0 <= together.min() <= together.max() < size


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.slow
@pytest.mark.exhaustive
def test_all_orders_of_a_few_come_equally_often(size: int) -> None:
    orders = Counter(tuple(permute(np.arange(size), size, stream_key(7, key)).tolist()) for key in range(4800))
    assert set(orders) == set(permutations(range(size)))
    assert chisquare(list(orders.values())).pvalue > 1e-3


@pytest.mark.parametrize("size", [7, 16, 29])
@pytest.mark.often("16", then="slow")
def test_an_index_goes_to_every_place_equally_often(size: int) -> None:
    table = np.zeros((size, size), dtype=int)
    for key in range(3000):
        table[np.arange(size), permute(np.arange(size), size, stream_key(key))] += 1
    assert min(chisquare(row).pvalue for row in table) > 1e-3 / size
    pairs = Counter(tuple(permute(np.array([0, 1]), size, stream_key(key, 1)).tolist()) for key in range(3000))
    expected = 3000 / (size * (size - 1))
    found = [pairs[a, b] for a in range(size) for b in range(size) if a != b]
    assert chisquare(found, [expected] * len(found)).pvalue > 1e-3


def test_the_order_of_a_seed_never_changes() -> None:
    """A release that shuffled otherwise would show resumed runs other data than they had left."""
    assert stream_key(0, 1, 2) == 6224988772286858847
    assert permute(np.arange(10), 10, stream_key(3)).tolist() == [4, 5, 9, 1, 0, 3, 8, 6, 7, 2]


def test_different_parts_give_different_keys() -> None:
    keys = {stream_key(a, b) for a in range(50) for b in range(50)}
    assert len(keys) == 2500


def test_an_index_outside_is_refused() -> None:
    with pytest.raises(IndexError):
        permute(5, 5, 0)
    with pytest.raises(IndexError):
        permute(-1, 5, 0)
