"""Copies of a part of a tensor must be equal to the bit; the largest difference is named."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist

from stoker.checkpoint.chunks import Chunk
from stoker.launch.process_pool import Pool
from stoker.verify.difference import Difference
from stoker.verify.replica_check import difference_of_replicas

pytestmark = pytest.mark.pool


def differing(last: float) -> Difference:
    """All processes have a weight of ones, but for one number on the last one, and a row of a table of their own."""
    rank, world = dist.get_rank(), dist.get_world_size()
    weight = torch.ones(3, dtype=torch.float64)
    weight[1] = last if rank == world - 1 else 1.0
    row = Chunk(torch.full((1, 2), float(rank)), (rank, 0), (world, 2))
    return difference_of_replicas({"weight": [Chunk.whole(weight)], "table": [row]})


def test_equal_copies_and_parts_of_their_own(pool: Pool) -> None:
    assert pool.run(differing, 1.0, world=2) == [Difference(0.0, "nothing")] * 2


def test_one_wrong_bit_is_found(pool: Pool) -> None:
    for found in pool.run(differing, math.nextafter(1.0, 2.0), world=3):
        assert found == Difference(2.0**-52, "weight on the processes 0 and 2")


def test_a_copy_that_is_no_number_is_found_beside_equal_ones(pool: Pool) -> None:
    for found in pool.run(differing, math.nan, world=3):
        assert math.isnan(found.size) and found.where == "weight on the processes 0 and 2"
