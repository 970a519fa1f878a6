"""The heartbeat of a process that `stoker train` started."""

from __future__ import annotations

from stoker.launch.cluster_env import RankInfo
from stoker.launch.run_spec import RunSpec
from stoker.resilience.heartbeat import Heart
from stoker.resilience.stack_dumps import record_collectives, write_collectives_when_asked
from stoker.runs.shm_folder import shared_folder


def beating(work: RunSpec, place: RankInfo) -> Heart:
    """Starts this process' heartbeat, and the flight recorder of a GPU's collectives."""
    folder = shared_folder(work.output)
    nccl = has_nccl()
    if nccl:
        record_collectives()
        write_collectives_when_asked(folder, work.logs, place.rank)
    # What a GPU computes and what it waits for cannot be told apart from outside: there its own time is that of
    # reading samples, and the device's rate is what the tests before training and after a fault look at.
    return Heart(folder, place.rank, device_seconds=(lambda: 0.0) if nccl else None)


def has_nccl() -> bool:
    """Whether the processes talk through NCCL."""
    import torch
    import torch.distributed as dist

    return torch.cuda.is_available() and dist.is_nccl_available()
