"""Groups of items by size, against their definition."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from stoker.grouping import balanced, grouped, grouped_from

DRAW = random.Random(0)
SIZES = [DRAW.choices(range(10), k=count) for count in (0, 1, 2, 50)]


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("most", [0, 5, 9, 20])
def test_a_group_takes_what_fits(sizes: list[int], most: int) -> None:
    groups = list(grouped(sizes, int, most))
    assert [size for group in groups for size in group] == sizes and all(groups)
    assert all(sum(group) <= most or len(group) == 1 for group in groups)
    assert all(sum(group) + following[0] > most for group, following in pairwise(groups))


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("least", [1, 5, 9, 20])
def test_a_group_ends_once_it_is_large_enough(sizes: list[int], least: int) -> None:
    groups = list(grouped_from(sizes, int, least))
    assert [size for group in groups for size in group] == sizes and all(groups)
    assert all(sum(group) >= least for group in groups[:-1])
    assert all(sum(group[:-1]) < least for group in groups)


@pytest.mark.parametrize("bins", [1, 2, 3, 7])
@pytest.mark.parametrize("costs", SIZES)
def test_bins_differ_by_at_most_the_largest_item(costs: list[int], bins: int) -> None:
    descending = sorted(costs, reverse=True)
    found = balanced(descending, bins)
    loads = [sum(cost for cost, at in zip(descending, found, strict=True) if at == number) for number in range(bins)]
    assert sum(loads) == sum(costs)
    assert max(loads) - min(loads) <= max(costs, default=0)
