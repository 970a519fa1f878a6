"""The process group of a run: its back end, its network interface, and the threads of each process."""

from __future__ import annotations

import hmac
import io
import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import IO, Any

import psutil
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from stoker.hardware.processor import available_cores
from stoker.hardware.quirks import bound_to
from stoker.launch.cluster_env import LOOPBACK

MAC = 32  # bytes


def backend_of(device_type: str) -> str:
    """Returns the back end of a device: NCCL for GPUs, and gloo for tensors in host memory."""
    return "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"


@contextmanager
def process_group(
    device: torch.device, *, rank: int, world: int, store: dist.Store | None = None, timeout: float
) -> Iterator[None]:
    """A context in which the run's process group exists.

    After an error, NCCL's group is not destroyed: destroying it waits for the peers, which wait for this
    process in a collective, so the error would be reported only after their timeout (pytorch#141510).

    Args:
        store: the rendezvous store; by default the one that MASTER_ADDR and MASTER_PORT name.
        timeout: seconds that a process waits for the others in one collective.
    """
    dist.init_process_group(
        backend_of(device.type),
        rank=rank,
        world_size=world,
        store=store,
        timeout=timedelta(seconds=timeout),
        device_id=device if device.type == "cuda" else None,
    )
    try:
        yield
    except BaseException:
        if device.type != "cuda":
            dist.destroy_process_group()
        raise
    dist.destroy_process_group()


def bind_to_loopback() -> None:
    """Makes the groups of this process bind to the loopback interface, and look up no host name."""
    interfaces = psutil.net_if_addrs().items()
    name = next((name for name, found in interfaces if any(a.address == LOOPBACK for a in found)), "lo")
    os.environ |= bound_to(name)


def bind_to(name: str) -> None:
    """Makes the groups of this process bind to a network interface, unless a variable of the user names one."""
    for variable, value in bound_to(name).items():
        os.environ.setdefault(variable, value)


def seal_objects(secret: bytes) -> None:
    """Restricts the object collectives of this process to unpickle only data from a process with the same secret.

    Gloo accepts the first connection to its port as the peer, and any user of this machine can connect to loopback.
    """
    distributed_c10d._pickler = partial(_SealingPickler, secret)  # type: ignore[assignment]
    distributed_c10d._unpickler = partial(_SealedUnpickler, secret)  # type: ignore[assignment]


class _SealingPickler:
    """Writes a pickle behind its message authentication code."""

    def __init__(self, secret: bytes, file: IO[bytes]) -> None:
        self._secret, self._file = secret, file

    def dump(self, value: Any) -> None:
        pickled = pickle.dumps(value)
        self._file.write(_mac(self._secret, pickled) + pickled)


class _SealedUnpickler:
    """Reads what `_SealingPickler` wrote.

    Raises:
        ConnectionError: a process without the secret wrote it.
    """

    def __init__(self, secret: bytes, file: io.BytesIO) -> None:
        self._secret, self._file = secret, file

    def load(self) -> Any:
        code, pickled = self._file.read(MAC), self._file.read()
        if not hmac.compare_digest(code, _mac(self._secret, pickled)):
            raise ConnectionError("an object came from a process that does not belong to this run")
        return pickle.loads(pickled)


def _mac(secret: bytes, pickled: bytes) -> bytes:
    return hmac.digest(secret, pickled, "sha256")


def share_cores(processes: int) -> None:
    """Limits this process' threads to OMP_NUM_THREADS, which may be newer than torch's own, or its share of cores."""
    asked = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    torch.set_num_threads(int(asked) if asked.isdecimal() and int(asked) else max(1, available_cores() // processes))
