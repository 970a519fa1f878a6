"""Test of the links between nodes, in two rounds of pairs: a node that is slow with two partners is at fault.

The scheme is that of DLRover's node check. Results are exchanged through the processes' store, not over the links.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from statistics import median_low

import torch
import torch.distributed as dist

from stoker.resilience.device_test import NodeFinding

NUMBERS = 2**20  # float32, in each direction
TIMES = 3  # the fastest exchange of a pair counts
SLOW = 3.0  # slowdown in both rounds that counts as a fault
NOTICEABLE = 0.02  # seconds by which a slow exchange must exceed a usual one
PATIENCE = timedelta(seconds=30)  # timeout of an exchange
FEWEST = 3  # nodes: of two, the slow one cannot be identified

Exchange = Callable[[int], float]
"""Exchanges numbers with a rank, which must do the same; returns the seconds, infinite on failure."""


@dataclass(frozen=True)
class Links:
    """Durations of each node's exchanges.

    Attributes:
        ranks: ranks of each node.
        names: names of the nodes.
        seconds: duration of each node's fastest exchange, by round.
    """

    ranks: Sequence[tuple[int, ...]]
    names: Sequence[str]
    seconds: Sequence[Sequence[float]]

    @property
    def rates(self) -> dict[str, float]:
        """Rate of each node's best exchange, bytes/s."""
        return {name: bytes_a_second(min(times)) for name, *times in zip(self.names, *self.seconds, strict=True)}

    @property
    def usual(self) -> float:
        """Usual duration of an exchange, seconds."""
        return median_low([seconds for times in self.seconds for seconds in times])

    def findings(self, *, on_cpu: bool) -> list[NodeFinding]:
        """Returns the faulty nodes.

        A slow one is excluded from training only if it has GPUs: a CPU's rate depends on other load.
        """
        found, usual = [], self.usual
        for ranks, name, *seconds in zip(self.ranks, self.names, *self.seconds, strict=True):
            best = min(seconds)
            if math.isinf(best):
                found.append(NodeFinding(ranks, f"{name} exchanges nothing with two other nodes", True))
            elif best > max(SLOW * usual, usual + NOTICEABLE):
                rates = [f"{bytes_a_second(seconds) / 1e6:,.0f} MB/s" for seconds in (best, usual)]
                words = f"{name} exchanges {rates[0]} with two other nodes, and others {rates[1]}"
                found.append(NodeFinding(ranks, words, not on_cpu))
        return found


def check_links(node: str, exchange: Exchange) -> Links | None:
    """Tests the links of all nodes; a collective. None for fewer than three nodes.

    Args:
        node: name of this process' node.
    """
    if not dist.is_initialized():
        return None
    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
    store.set(f"links/node/{rank}", node)
    nodes = [store.get(f"links/node/{other}").decode() for other in range(dist.get_world_size())]
    names = list(dict.fromkeys(nodes))
    if len(names) < FEWEST:
        return None
    firsts = [nodes.index(name) for name in names]
    order, rounds = list(range(len(names))), []
    for number in range(2):
        times = dict.fromkeys(range(len(names)), math.inf)
        for a, b in pairs(order):
            if rank in (firsts[a], firsts[b]):
                mine, other = (a, b) if rank == firsts[a] else (b, a)
                if _both_are_there(store, f"links/{number}/{a}-{b}", rank, firsts[other]):
                    times[mine] = min(times[mine], exchange(firsts[other]))
        if rank in firsts:
            store.set(f"links/{number}/{rank}", json.dumps(times[firsts.index(rank)]))
        rounds.append([float(json.loads(store.get(f"links/{number}/{first}"))) for first in firsts])
        by_time = sorted(order, key=lambda i: rounds[-1][i])
        order = [i for pair in zip(by_time, reversed(by_time), strict=True) for i in pair][: len(order)]
    return Links([tuple(i for i, of in enumerate(nodes) if of == name) for name in names], names, rounds)


def _both_are_there(store: dist.Store, pair: str, rank: int, other: int) -> bool:
    """Waits for the other node, so that its delay by a third node does not count for this link."""
    store.set(f"{pair}/{rank}", "")
    try:
        store.wait([f"{pair}/{other}"], 3 * PATIENCE)
    except RuntimeError:
        return False
    return True


def pairs(order: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yields pairs of neighbours; of an odd number, the last three are paired with each other."""
    even = len(order) - 3 if len(order) % 2 else len(order)
    yield from zip(order[:even:2], order[1:even:2], strict=True)
    if even < len(order):
        a, b, c = order[even:]
        yield from ((a, b), (b, c), (c, a))


def exchange_with(device: torch.device) -> Exchange:
    """Returns a function that exchanges messages between two processes and checks the received data."""
    sent = torch.arange(NUMBERS, dtype=torch.float32, device=device)

    def exchange(other: int) -> float:
        first = dist.get_rank() < other  # NCCL has one communicator per pair, and processes its messages in order
        best = math.inf
        for _ in range(1 + TIMES):  # the first exchange connects
            got = torch.empty_like(sent)
            begin = time.perf_counter()
            try:
                works = [dist.isend(sent, other) if first else dist.irecv(got, other)]
                works.append(dist.irecv(got, other) if first else dist.isend(sent, other))
                for work in works:
                    assert work is not None
                    work.wait(PATIENCE)
            except RuntimeError:
                return math.inf
            if not torch.equal(got, sent):  # waits for the device
                return math.inf
            best = min(best, time.perf_counter() - begin)
        return best

    return exchange


def bytes_a_second(seconds: float) -> float:
    """Returns the rate of an exchange, both directions together."""
    return 2 * 4 * NUMBERS / seconds
