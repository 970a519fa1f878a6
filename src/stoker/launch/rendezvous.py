"""Rendezvous of processes that several torchrun agents started.

The agents' store outlives the processes, and PyTorch tells their starts apart by the number of restarts. But agents
count those differently: one whose own process failed counts it, one that only follows another does not. Their
processes would then wait for each other until the timeout. So those of one start first agree on a name for it.
"""

from __future__ import annotations

import time
import uuid
from datetime import timedelta

import torch.distributed as dist

POLL = 0.05  # seconds
PREFIX = "stoker"


def meet(store: dist.Store, *, rank: int, world: int, timeout: float) -> dist.Store:
    """The part of a store that the processes of this start have for themselves.

    Each says by a name of its own that it is there, rank 0 answers under that name, and each confirms the answer: what
    processes of earlier starts left in the store is neither answered to nor taken for an answer.

    Args:
        timeout: seconds to wait for all of them.

    Raises:
        RuntimeError: some of them have not come.
    """
    store = dist.PrefixStore(PREFIX, store)
    if rank != 0:
        mine = uuid.uuid4().hex
        store.set(f"here/{rank}", mine)
        store.wait([f"start/{mine}"], timedelta(seconds=timeout))
        start = store.get(f"start/{mine}").decode()
        store.set(f"{start}/{rank}", "")
        return dist.PrefixStore(start, store)
    start = uuid.uuid4().hex
    missing = set(range(1, world))
    deadline = time.monotonic() + timeout
    while missing:
        for other in sorted(missing):
            if store.check([f"here/{other}"]):
                store.set(f"start/{store.get(f'here/{other}').decode()}", start)
            if store.check([f"{start}/{other}"]):
                missing.discard(other)
        if missing and time.monotonic() > deadline:
            raise RuntimeError(f"TCPStore: ranks {sorted(missing)} have not come within {timeout:g} s")
        time.sleep(POLL if missing else 0)
    return dist.PrefixStore(start, store)
