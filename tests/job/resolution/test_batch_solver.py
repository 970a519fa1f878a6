"""The batch triangle: every answer satisfies its equation and keeps the corners that were given."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.job.layout import Layout
from stoker.job.resolution.batch_solver import (
    DEFAULT_BATCH,
    TOKENS_PER_PASS,
    BatchError,
    BatchTriangle,
    divisors,
    solve_batch,
)

SIZES = st.integers(1, 96)
CORNER = st.none() | SIZES
OPEN = {
    **dict.fromkeys(("batch", "micro_batch", "accumulation", "data_parallel", "seq_len", "samples")),
    "default_batch": DEFAULT_BATCH,
    "pipeline": Layout(),
}


def solve(**corners: Any) -> BatchTriangle:
    """Solves corners in one stage; those that are not given are open."""
    return solve_batch(**{**OPEN, **corners})


@given(CORNER, CORNER, CORNER, CORNER, st.none() | st.integers(8, 20_000))
def test_an_answer_is_right_and_an_error_is_deserved(
    batch: int | None,
    micro_batch: int | None,
    accumulation: int | None,
    processes: int | None,
    seq_len: int | None,
) -> None:
    corners = {
        "batch": batch,
        "micro_batch": micro_batch,
        "accumulation": accumulation,
        "data_parallel": processes,
    }
    try:
        solved = solve(
            batch=batch,
            micro_batch=micro_batch,
            accumulation=accumulation,
            data_parallel=processes,
            seq_len=seq_len,
        )
    except BatchError:
        # By hand: no whole numbers fit. An unknown number of processes is one, unless all others are given.
        assert batch is not None
        fixed = (micro_batch or 1) * (accumulation or 1) * (processes or 1)
        if None not in (micro_batch, accumulation) and processes is not None:
            assert fixed != batch
        else:
            assert batch % fixed != 0
        return
    assert solved.batch == solved.micro_batch * solved.accumulation * solved.data_parallel
    for name, value in corners.items():
        assert value is None or getattr(solved, name) == value
    if micro_batch is None and accumulation is None:
        limit = max(1, TOKENS_PER_PASS // seq_len) if seq_len else solved.batch
        share = solved.batch // solved.data_parallel
        assert solved.micro_batch == max(d for d in range(1, share + 1) if share % d == 0 and d <= limit)


@given(SIZES, SIZES, SIZES)
def test_any_three_corners_give_the_fourth(micro_batch: int, accumulation: int, processes: int) -> None:
    whole = BatchTriangle(micro_batch * accumulation * processes, micro_batch, accumulation, processes)
    for left_out in ("batch", "micro_batch", "accumulation", "data_parallel"):
        corners = {name: value for name, value in vars(whole).items() if name != left_out}
        assert solve(**corners) == whole


def test_defaults() -> None:
    assert solve() == BatchTriangle(8, 8, 1, 1)
    assert solve(default_batch=16, seq_len=1024) == BatchTriangle(16, 8, 2, 1)
    assert solve(data_parallel=3) == BatchTriangle(6, 2, 1, 3)
    assert solve(data_parallel=64) == BatchTriangle(64, 1, 1, 64)
    assert solve(micro_batch=2) == BatchTriangle(2, 2, 1, 1)
    assert solve(accumulation=4) == BatchTriangle(8, 2, 4, 1)
    assert solve(batch=7, seq_len=4096) == BatchTriangle(7, 1, 7, 1)


@pytest.mark.parametrize(
    ("corners", "message", "suggestion"),
    [
        ({"batch": 10, "micro_batch": 4}, "batch 10 is not a multiple of micro_batch 4", "batch 8 or 12"),
        ({"batch": 10, "micro_batch": 4}, "batch 10", "micro_batch 2 or 5"),
        (
            {"batch": 6, "micro_batch": 5, "samples": 12},
            "batch 6 is not a multiple of micro_batch 5",
            "write micro_batch",
        ),
        ({"batch": 6, "micro_batch": 5, "data_parallel": 5, "samples": 12}, "data-parallel 5 = 25", "smaller numbers"),
        ({"batch": 4, "data_parallel": 6}, "batch 4 is not a multiple of data-parallel 6", "batch 6"),
        (
            {"batch": 32, "micro_batch": 4, "accumulation": 4, "data_parallel": 1},
            "micro_batch 4 x accumulation 4 x data-parallel 1 is 16, but batch is 32",
            "write batch 16",
        ),
        ({"micro_batch": 2**30, "accumulation": 2}, "a step would take 2147483648 sequences", "at most 2147483647"),
    ],
)
def test_contradictions_name_the_numbers(corners: dict[str, int], message: str, suggestion: str) -> None:
    with pytest.raises(BatchError) as caught:
        solve(**corners)
    assert message in caught.value.message
    assert suggestion in caught.value.suggestion


@given(st.integers(1, 5000))
def test_divisors(number: int) -> None:
    assert divisors(number) == [d for d in range(1, number + 1) if number % d == 0]
