"""Async tensor parallelism: collectives overlap with parts of the matrix product beside them (Wang et al., 2023).

torch's compiler replaces an all-gather and the products of its result by one operator, and a product and the
reduce-scatter of its result by another. They multiply the part of one process while that of the next is copied, through
memory that all devices of the group can access.
"""

from __future__ import annotations

import socket
import warnings

import torch
import torch.distributed as dist

from stoker.errors import CannotRun, Problem
from stoker.hardware.process_device import is_nvidia
from stoker.parallel.mesh import Mesh


def enable_async_tensor(mesh: Mesh) -> None:
    """Allows the operators on the tensor processes, before their blocks are compiled. A collective.

    Raises:
        CannotRun: they do not have NVIDIA GPUs that can access each other's memory.
    """
    group = mesh.groups["tensor"]
    assert group is not None
    if not is_nvidia(mesh.device) or not _access_each_other(mesh.device, group):
        message = "parallel.async_tensor: needs NVIDIA GPUs of one machine that can access each other's memory"
        raise CannotRun(Problem(message, "write `async_tensor: false`"))
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    with warnings.catch_warnings():
        # torch 2.13 says that the call is no longer needed, but its compiler pass still asks for it.
        warnings.simplefilter("ignore", FutureWarning)
        enable_symm_mem_for_group(group.group_name)


def _access_each_other(device: torch.device, group: dist.ProcessGroup) -> bool:
    """Returns whether all devices of a group can access each other's memory, the same on all processes."""
    places: list[tuple[str, int]] = [("", 0)] * dist.get_world_size(group)
    dist.all_gather_object(places, (socket.gethostname(), device.index), group=group)
    hosts, indices = {host for host, _ in places}, {index for _, index in places}
    if len(hosts) > 1 or len(indices) < len(places) or max(indices) >= torch.cuda.device_count():
        return False
    return all(torch.cuda.can_device_access_peer(one, other) for one in indices for other in indices - {one})
