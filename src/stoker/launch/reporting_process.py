"""The process of a machine that reports an error that all of a launcher's processes meet: that of local rank 0."""

from __future__ import annotations

import os
from collections.abc import Mapping

import psutil

from stoker.launch.cluster_env import RankInfo

SECONDS_TO_REPORT = 20.0  # in which it meets the same error, though it started later

# The variable of the local rank, and those that are equal in all processes of a start, by launcher.
VARIABLES = {
    "LOCAL_RANK": ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    "SLURM_LOCALID": ("SLURM_JOB_ID", "SLURM_STEP_ID"),
}


def reported_elsewhere(rank_info: RankInfo) -> bool:
    """Returns whether another process of this machine reports the error that this one has met.

    Waits until that process has ended, because a launcher kills all of its processes once one of them has ended, and
    that one might not have reported yet. Returns False if it does not end: then it has not met the error.
    """
    if rank_info.speaks:
        return False
    _, left = psutil.wait_procs(_first_processes(os.environ), SECONDS_TO_REPORT)
    return not left


def _first_processes(environment: Mapping[str, str]) -> list[psutil.Process]:
    """Returns the processes of the same start with local rank 0."""
    local = next((name for name in VARIABLES if name in environment), None)
    if local is None:
        return []
    wanted = {local: "0", **{name: environment.get(name) for name in VARIABLES[local]}}
    found = []
    for process in psutil.process_iter():
        try:
            own = process.environ()
        except (psutil.Error, OSError):  # of another user, or it has ended
            continue
        if all(own.get(name) == value for name, value in wanted.items()):
            found.append(process)
    return found
