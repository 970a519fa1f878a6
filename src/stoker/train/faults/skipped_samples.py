"""Samples that training skips because a step with them went wrong, as spans of sample numbers of the whole run.

The order of the others stays a pure function of seed, epoch and number.
"""

from __future__ import annotations

from collections.abc import Sequence

Span = tuple[int, int]
"""(first sample, sample after the last)."""


def next_span(first: int, batch: int, skipped: Sequence[Sequence[int]]) -> Span:
    """Returns the samples of the step that begins at ``first``, or later if they are skipped.

    Args:
        batch: samples per step; a step that would reach into a skipped span has fewer.
        skipped: spans, in any order.
    """
    while inside := [end for start, end in skipped if start <= first < end]:
        first = max(inside)
    return first, min([first + batch, *(start for start, _ in skipped if start > first)])


def steps_in(first: int, last: int, batch: int, skipped: Sequence[Sequence[int]]) -> int:
    """Returns the number of steps over samples first .. last-1."""
    steps = 0
    for start, end in _kept(first, last, skipped):
        steps += -(-(end - start) // batch)
    return steps


def end_of(first: int, steps: int, batch: int, skipped: Sequence[Sequence[int]]) -> int:
    """Returns the sample after the last one of ``steps`` steps."""
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
    """Returns the spans of samples that are not skipped."""
    kept = []
    for start, end in sorted((int(start), int(end)) for start, end in skipped):
        if first < min(start, last):
            kept.append((first, min(start, last)))
        first = max(first, end)
    return [*kept, (first, last)] if first < last else kept
