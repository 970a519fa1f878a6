"""Steps over samples of which some spans are skipped, against walking them one by one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stoker.train.faults.skipped_samples import Span, end_of, next_span, steps_in

SPANS = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 12)).map(lambda s: (s[0], s[0] + s[1])), max_size=5)


def walk(first: int, batch: int, skipped: list[Span]) -> list[int]:
    """The samples of the step that begins with ``first``, one by one."""
    allowed = [n for n in range(first, 400) if not any(start <= n < end for start, end in skipped)]
    return [n for i, n in enumerate(allowed[:batch]) if n == allowed[0] + i]


@given(st.integers(0, 60), st.integers(1, 9), SPANS)
def test_a_step_takes_what_is_not_skipped(first: int, batch: int, skipped: list[Span]) -> None:
    assert list(range(*next_span(first, batch, skipped))) == walk(first, batch, skipped)


@given(st.integers(0, 60), st.integers(0, 20), st.integers(1, 9), SPANS)
def test_steps_end_where_walking_ends(first: int, steps: int, batch: int, skipped: list[Span]) -> None:
    at, seen = first, []
    for _ in range(steps):
        taken = walk(at, batch, skipped)
        seen += taken
        at = taken[-1] + 1
    assert end_of(first, steps, batch, skipped) == at
    assert steps_in(first, at, batch, skipped) == steps
    assert len(set(seen)) == len(seen) and not any(start <= n < end for n in seen for start, end in skipped)


def test_without_any_nothing_changes() -> None:
    assert next_span(8, 4, []) == (8, 12) and steps_in(8, 19, 4, []) == 3 and end_of(8, 3, 4, []) == 20
