"""Samples that training skips because a step with them went wrong, as spans of sample numbers of the whole run.

The order of the rest stays what it is: a pure function of seed, epoch and number.
"""

from __future__ import annotations

from collections.abc import Sequence

Span = tuple[int, int]
"""First sample, and the one after the last."""


def next_span(first: int, batch: int, skipped: Sequence[Sequence[int]]) -> Span:
    """The samples of the step that begins with ``first``, or after it where that one is skipped.

    Args:
        batch: samples of a step; it has fewer where it would reach into a skipped span.
        skipped: spans, in any order.
    """
    while inside := [end for start, end in skipped if start <= first < end]:
        first = max(inside)
    return first, min([first + batch, *(start for start, _ in skipped if start > first)])


def steps_in(first: int, last: int, batch: int, skipped: Sequence[Sequence[int]]) -> int:
    """Steps that the samples first .. last-1 make."""
    steps = 0
    for start, end in _kept(first, last, skipped):
        steps += -(-(end - start) // batch)
    return steps


def end_of(first: int, steps: int, batch: int, skipped: Sequence[Sequence[int]]) -> int:
    """The sample after the last one of ``steps`` steps."""
    if not steps:
        return first
    beyond = max([first, *(end for _, end in skipped)])
    for start, end in _kept(first, beyond, skipped):
        within = -(-(end - start) // batch)
        if steps <= within:
            return min(end, start + steps * batch)
        steps -= within
    return beyond + steps * batch


def _kept(first: int, last: int, skipped: Sequence[Sequence[int]]) -> list[Span]:
    """The spans of samples that are not skipped."""
    kept = []
    for start, end in sorted((int(start), int(end)) for start, end in skipped):
        if first < min(start, last):
            kept.append((first, min(start, last)))
        first = max(first, end)
    return [*kept, (first, last)] if first < last else kept
