"""Bytes on the wire: against rings that are walked step by step."""

from __future__ import annotations

import pytest

from stoker.plan.network_cost import Kind, wire_bytes


def walked_ring(kind: Kind, size: int, processes: int) -> int:
    """What one process sends when a ring passes on one chunk a turn."""
    chunk = size // processes
    turns = {
        "reduce-scatter": range(processes - 1),  # a partial sum of one chunk goes on each turn
        "all-gather": range(processes - 1),  # a finished chunk goes on each turn
        "all-reduce": range(2 * (processes - 1)),  # the one, then the other
        "all-to-all": range(processes - 1),  # one chunk straight to each of the others
    }[kind]
    return sum(chunk for _ in turns)


@pytest.mark.parametrize("kind", ["all-reduce", "all-gather", "reduce-scatter", "all-to-all"])
@pytest.mark.parametrize("processes", [1, 2, 4, 8])
def test_the_formula_is_the_walked_ring(kind: Kind, processes: int) -> None:
    assert wire_bytes(kind, 1 << 20, processes) == walked_ring(kind, 1 << 20, processes)


def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather() -> None:
    both = wire_bytes("reduce-scatter", 1000, 5) + wire_bytes("all-gather", 1000, 5)
    assert wire_bytes("all-reduce", 1000, 5) == both
