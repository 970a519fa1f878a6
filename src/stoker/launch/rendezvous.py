"""Rendezvous of processes that several torchrun agents started.

The agents' store outlives the processes, and PyTorch distinguishes their starts by the number of restarts. But agents
count restarts differently: an agent whose own process failed counts it, one that only follows another does not. Their
processes would then wait for each other until the timeout. So the processes of one start first agree on its name.
"""

from __future__ import annotations

import time
import uuid
from datetime import timedelta

import torch.distributed as dist

POLL = 0.05  # seconds
PREFIX = "stoker"


def private_store(store: dist.Store, *, rank: int, world: int, timeout: float) -> dist.Store:
    """Returns a part of the store that is private to the processes of this start.

    Each process announces itself under a unique name, rank 0 answers under that name, and each confirms the answer:
    entries that processes of earlier starts left in the store are neither answered nor taken for an answer.

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
