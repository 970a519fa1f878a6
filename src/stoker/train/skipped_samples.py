"""Samples that training passes over because a step with them went wrong: spans of numbers, over the whole run.

The order of the rest stays what it is: a pure function of seed, epoch and number.
"""

from __future__ import annotations

from collections.abc import Sequence

Span = tuple[int, int]
"""First sample, and the one after the last."""


def next_span(first: int, batch: int, passed: Sequence[Sequence[int]]) -> Span:
    """The samples of the step that begins with ``first``, or behind it where that is passed over.

    Args:
        batch: samples of a step; it has fewer where it would reach into a span that is passed over.
        passed: spans, in any order.
    """
    while inside := [end for start, end in passed if start <= first < end]:
        first = max(inside)
    return first, min([first + batch, *(start for start, _ in passed if start > first)])


def steps_in(first: int, last: int, batch: int, passed: Sequence[Sequence[int]]) -> int:
    """Steps that the samples first .. last-1 make."""
    steps = 0
    for start, end in _kept(first, last, passed):
        steps += -(-(end - start) // batch)
    return steps


def end_of(first: int, steps: int, batch: int, passed: Sequence[Sequence[int]]) -> int:
    """The sample after the last of so many steps."""
    if not steps:
        return first
    beyond = max([first, *(end for _, end in passed)])
    for start, end in _kept(first, beyond, passed):
        within = -(-(end - start) // batch)
        if steps <= within:
            return min(end, start + steps * batch)
        steps -= within
    return beyond + steps * batch


def _kept(first: int, last: int, passed: Sequence[Sequence[int]]) -> list[Span]:
    """What lies between the spans."""
    kept = []
    for start, end in sorted((int(start), int(end)) for start, end in passed):
        if first < min(start, last):
            kept.append((first, min(start, last)))
        first = max(first, end)
    return [*kept, (first, last)] if first < last else kept
