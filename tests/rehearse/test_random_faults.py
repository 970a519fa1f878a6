"""Random faults: the same for the same seed, each with the room that it needs."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.rehearse.random_faults import ON_ONE_NODE, draw_faults
from stoker.resilience.fault_injection import KINDS, OF_NODES, SLOW_STEPS


@settings(deadline=None)
@given(st.integers(0, 50), st.integers(1, 3), st.integers(2, 9))
def test_faults_have_the_room_that_they_need(seed: int, world: int, save_every: int) -> None:
    faults = draw_faults(30, seed=seed, steps=600, world=world, save_every=save_every)
    assert len(faults) == 30 and faults == draw_faults(30, seed=seed, steps=600, world=world, save_every=save_every)
    steps = [fault.step for fault in faults]
    assert steps == sorted(set(steps)) and steps[0] >= 3 and steps[-1] < 600
    for fault, following in pairwise(faults):
        assert following.step - fault.step >= (SLOW_STEPS if fault.kind == "slow" else 2)
    for fault in faults:
        assert 0 <= fault.rank < world and (fault.kind == "slow") == (fault.factor > 1)
        assert fault.kind != "corrupt" or fault.step > 2 * save_every
        assert fault.kind != "fill-disk" or fault.step % save_every in (save_every - 1, 0)
    assert {fault.kind for fault in faults} == set(ON_ONE_NODE) - ({"slow"} if world == 1 else set())


def test_nodes_are_lost_and_cut_off_where_there_are_several() -> None:
    faults = [
        fault for fault in draw_faults(30, seed=3, steps=600, world=6, save_every=5, kinds=KINDS, nodes=3) if fault.node
    ]
    assert {fault.kind for fault in faults} == set(OF_NODES) and {int(fault.node) for fault in faults} <= {0, 1, 2}
    assert all((fault.seconds > 0) == (fault.kind == "cut-link") for fault in faults)


def test_another_seed_gives_others() -> None:
    assert len({str(draw_faults(5, seed=seed, steps=300, world=2, save_every=5)) for seed in range(10)}) == 10


def test_a_run_too_short_for_so_many_says_so() -> None:
    with pytest.raises(ValueError, match=r"20 steps have room for \d+ of 30 faults"):
        draw_faults(30, seed=0, steps=20, world=2, save_every=5)
