"""Bytes on the wire against rings that are walked step by step; measured collectives against closed forms."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stoker.hardware.machines.cluster import Cluster, cluster_of
from stoker.hardware.machines.device_names import device_kind
from stoker.hardware.measured.calibration import Calibration, Curve
from stoker.plan.time.efficiency import Efficiency
from stoker.plan.time.network_cost import EFA_STEP, CollectiveGroup, Kind, collective_seconds, send_seconds, wire_bytes

SIZES = (2**10, 2**20, 2**30)
STEP, RATE = 1e-5, 1e9  # seconds of a ring's step, bytes per second that each process sends


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


def _ring(kind: Kind, size: float, processes: int) -> float:
    rounds = (2 if kind == "all-reduce" else 1) * (processes - 1)
    return rounds * STEP + wire_bytes(kind, int(size), processes) / RATE


def _measured(nodes: int = 1) -> Cluster:
    """Nodes of eight GPUs, whose collectives of two and eight processes were measured as rings."""
    kinds: tuple[Kind, ...] = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")
    curves = [
        Curve(kind, SIZES, tuple(_ring(kind, size, ranks) for size in SIZES), ranks)
        for kind in kinds
        for ranks in (2, 8)
    ]
    curves += [Curve("send", SIZES, (2e-5, 2e-3, 2.0), 8)]
    found = Calibration("2026-11-27", "m", "d", 0, "2", (), tuple(curves), 1e-6)
    return replace(cluster_of(device_kind("H100"), nodes=nodes, per_node=8), calibration=found)


@pytest.mark.parametrize("kind", ["all-reduce", "all-gather", "reduce-scatter", "all-to-all"])
@pytest.mark.parametrize("processes", [2, 4, 8])
def test_measured_collectives_replace_those_of_the_catalogue(kind: Kind, processes: int) -> None:
    cluster, group = _measured(), CollectiveGroup(processes, 1)
    large, calls = 2**32, 4
    seconds = collective_seconds(kind, large, group, cluster, Efficiency(), calls=calls)
    assert seconds == pytest.approx(calls * _ring(kind, large / calls, processes), rel=5e-3)
    small = collective_seconds(kind, 8, group, cluster, Efficiency())
    assert small == pytest.approx(_ring(kind, SIZES[0], processes), rel=0.1)  # all latency


def test_between_nodes_the_catalogue_counts() -> None:
    both = CollectiveGroup(16, 1)
    measured = _measured(nodes=2)
    without = replace(measured, calibration=None)
    one, other = (collective_seconds("all-reduce", 2**30, both, each, Efficiency()) for each in (measured, without))
    assert one == other
    sends = [send_seconds(2**30, stride=8, cluster=each, efficiency=Efficiency()) for each in (measured, without)]
    assert sends[0] == sends[1]


def test_sends_are_those_of_all_processes_at_once() -> None:
    assert send_seconds(2**20, stride=1, cluster=_measured(), efficiency=Efficiency()) == pytest.approx(2e-3)


def test_a_faster_link_has_more_bandwidth_and_the_same_latency() -> None:
    group = CollectiveGroup(8, 1)
    slow, fast, free = (
        [collective_seconds("all-gather", size, group, cluster, Efficiency()) for size in (2**10, 2**30)]
        for cluster in (_measured(), _measured().with_faster_links(2), _measured().with_faster_links(1e12, latency=0.1))
    )
    assert fast[0] == slow[0] and fast[1] - fast[0] == pytest.approx((slow[1] - slow[0]) / 2)
    assert free == pytest.approx([0.1 * slow[0]] * 2)


def test_each_call_has_the_latency() -> None:
    ring, efficiency = CollectiveGroup(8, 1), Efficiency()
    many = collective_seconds("all-gather", 2**30, ring, _measured(), efficiency, calls=1024)
    assert many == pytest.approx(1024 * _ring("all-gather", 2**20, 8))
    cluster = replace(_measured(), calibration=None)
    one, four = (collective_seconds("all-gather", 2**30, ring, cluster, efficiency, calls=calls) for calls in (1, 4))
    assert four - one == pytest.approx(3 * (7 + efficiency.start) * cluster.link_latency_s)


def test_members_further_apart_than_a_node_are_each_on_another() -> None:
    assert [CollectiveGroup(4, stride).inside(8) for stride in (1, 4, 8, 16)] == [4, 2, 1, 1]


@pytest.mark.parametrize("fabric", ["", "EFA"])
def test_the_latency_between_nodes(fabric: str) -> None:
    cluster, ring, efficiency = replace(_measured(2), fabric=fabric), CollectiveGroup(16, 1), Efficiency()
    whole, half = (collective_seconds(kind, 1, ring, cluster, efficiency) for kind in ("all-reduce", "all-gather"))
    start, step = efficiency.start * cluster.link_latency_s, cluster.link_latency_s
    assert whole == pytest.approx(4 * cluster.network_latency_s + start, abs=1e-9)
    steps = 2 * cluster.network_latency_s + start + 14 * step
    assert half == pytest.approx(max(steps, 15 * EFA_STEP) if fabric else steps, abs=1e-9)


def test_as_many_processes_of_a_node_send_over_the_network_as_the_stride() -> None:
    cluster = replace(_measured(2), calibration=None, network_latency_s=0.0)
    one, five, ten = (send_seconds(1e6, stride=n, cluster=cluster, efficiency=Efficiency()) for n in (1, 5, 10))
    assert five == pytest.approx(5 * one) and ten == pytest.approx(8 * one)
