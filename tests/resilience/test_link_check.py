"""A node whose links are slow or broken with two others is named; one that was paired with it is not."""

from __future__ import annotations

import math
import time

import pytest
import torch
import torch.distributed as dist

from stoker.launch.process_pool import Pool
from stoker.resilience.link_check import Links, check_links, exchange_with, pairs

SECONDS = 0.5  # that a slow node loses


def checked(node_of: list[str], slow: int | None, broken: int | None) -> Links | None:
    rank = dist.get_rank()
    exchange = exchange_with(torch.device("cpu"))

    def with_faults(other: int) -> float:
        begin = time.perf_counter()
        seconds = exchange(other)
        if slow in (rank, other):
            time.sleep(SECONDS)
            seconds += time.perf_counter() - begin
        return math.inf if broken in (rank, other) else seconds

    return check_links(node_of[rank], with_faults)


@pytest.mark.pool
@pytest.mark.parametrize("node_of", [["a", "b", "c"], ["a", "b", "c", "d"]], ids=len)
@pytest.mark.slow
def test_the_slow_node_is_found_wherever_it_is(pool: Pool, node_of: list[str]) -> None:
    for slow in range(len(node_of)):
        found = pool.run(checked, node_of, slow, None, world=len(node_of))
        assert all(links == found[0] for links in found)
        (finding,) = found[0].findings(on_cpu=False)
        assert finding.ranks == (slow,) and finding.out and f"{node_of[slow]} exchanges" in finding.message
        (reported,) = found[0].findings(on_cpu=True)
        assert not reported.out


@pytest.mark.pool
def test_a_node_that_reaches_nobody_is_left_out_with_all_its_processes(pool: Pool) -> None:
    links = pool.run(checked, ["a", "b", "c", "b"], None, 1, world=4)[0]
    (finding,) = links.findings(on_cpu=True)
    assert finding.ranks == (1, 3) and finding.out and finding.message == "b exchanges nothing with two other nodes"
    assert links.rates["b"] == 0 < links.rates["a"]


def with_a_node_that_waits(patience: float) -> Links | None:
    """Node 0 exchanges nothing, and says so only when its patience is over."""
    rank = dist.get_rank()
    exchange = exchange_with(torch.device("cpu"))

    def with_patience(other: int) -> float:
        begin = time.perf_counter()
        if 0 in (rank, other):
            time.sleep(patience)
            return math.inf
        seconds = exchange(other)
        return seconds if time.perf_counter() - begin < patience else math.inf

    return check_links("abc"[rank], with_patience)


@pytest.mark.pool
def test_those_that_wait_for_the_partner_of_a_bad_node_are_not_at_fault(pool: Pool) -> None:
    links = pool.run(with_a_node_that_waits, 1.0, world=3)[0]
    assert [finding.ranks for finding in links.findings(on_cpu=True) if finding.out] == [(0,)]


@pytest.mark.pool
def test_good_links_and_two_nodes_have_no_findings(pool: Pool) -> None:
    links = pool.run(checked, ["a", "b", "c"], None, None, world=3)[0]
    assert not [finding for finding in links.findings(on_cpu=True) if finding.out]
    assert pool.run(checked, ["a", "b"], 0, None, world=2) == [None, None]


def test_numbers_that_arrive_changed_count_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    class Sent:
        def wait(self, _: object) -> None: ...

    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    for name in ("isend", "irecv"):
        monkeypatch.setattr(dist, name, lambda *_: Sent())
    assert math.isinf(exchange_with(torch.device("cpu"))(1))


@pytest.mark.parametrize("count", range(3, 12))
def test_every_node_is_paired_and_only_the_last_three_twice(count: int) -> None:
    found = [node for pair in pairs(list(range(count))) for node in pair]
    assert sorted(set(found)) == list(range(count)) and len(found) == (count + 3 if count % 2 else count)


def test_a_slow_link_is_a_fault_only_if_the_difference_can_be_noticed() -> None:
    def names(*rounds: list[float]) -> list[str]:
        found = Links([(0,), (1,), (2,), (3,)], "abcd", rounds).findings(on_cpu=False)
        return [finding.message[0] for finding in found if finding.out]

    assert names([0.1, 0.1, 0.1, 0.4], [0.1, 0.1, 0.1, 0.4]) == ["d"]
    assert names([0.1, 0.1, 0.1, 0.4], [0.1, 0.1, 0.1, 0.1]) == []  # slow with one partner only
    assert names([0.1, 0.1, 0.1, 0.25], [0.1, 0.1, 0.1, 0.25]) == []
    assert names([0.001, 0.001, 0.001, 0.02], [0.001, 0.001, 0.001, 0.02]) == []
    assert names([0.1, 0.1, 0.1, math.inf], [0.1, 0.1, 0.1, 0.1]) == []
