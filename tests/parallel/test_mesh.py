"""The groups of a mesh."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from stoker.job.layout import Layout
from stoker.launch.process_pool import Pool
from stoker.parallel.mesh import Mesh

CPU = torch.device("cpu")


def timeouts() -> tuple[timedelta, list[timedelta]]:
    """That of the default group, and those of the groups for sharding."""
    mesh = Mesh(Layout(data=2, shard="zero3", shard_size=1), CPU)
    groups = [*mesh.sharding.get_all_groups(), dist.group.WORLD]
    *found, default = [group._get_backend(CPU).options._timeout for group in groups if group is not None]
    return default, found


@pytest.mark.pool
def test_groups_for_sharding_wait_as_long_as_the_others(pool: Pool) -> None:
    for default, found in pool.run(timeouts, world=2):
        assert len(found) == 2 and set(found) == {default} and default != timedelta(minutes=30)
