"""Groups items by their total size or cost."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from heapq import heapreplace
from typing import TypeVar

T = TypeVar("T")


def grouped(items: Iterable[T], size: Callable[[T], int], most: int) -> Iterator[list[T]]:
    """Yields consecutive items in groups of at most ``most`` in total size; a larger item is alone."""
    group: list[T] = []
    held = 0
    for item in items:
        if group and held + size(item) > most:
            yield group
            group, held = [], 0
        group.append(item)
        held += size(item)
    if group:
        yield group


def grouped_from(items: Iterable[T], size: Callable[[T], int], least: int) -> Iterator[list[T]]:
    """Yields consecutive items in groups that end once their total size is at least ``least``."""
    group: list[T] = []
    held = 0
    for item in items:
        group.append(item)
        held += size(item)
        if held >= least:
            yield group
            group, held = [], 0
    if group:
        yield group


def balanced(costs: Iterable[float], bins: int) -> list[int]:
    """Returns a bin for each item: the one whose cost is the least so far (Graham, 1969).

    The largest total is less than 4/3 of the optimum if the costs descend.
    """
    loads = [(0.0, number) for number in range(bins)]
    found = []
    for cost in costs:
        load, number = loads[0]
        heapreplace(loads, (load + cost, number))
        found.append(number)
    return found
