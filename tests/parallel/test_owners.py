"""Work on tensors that is divided over processes, against the same work in one."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from stoker.launch.process_pool import Pool
from stoker.parallel import owners
from stoker.parallel.owners import on_owners

SIZES = ((3, 4), (5,), (1, 1), (2, 8), (7,))
AT_ONCE = 9


def results() -> tuple[list[Tensor], int]:
    """The results on this process, of which the last has none, and the most elements that it gathered at a time."""
    whole = [torch.arange(torch.Size(size).numel(), dtype=torch.float64).add(100 * i) for i, size in enumerate(SIZES)]
    found = [torch.zeros_like(result) for result in whole]
    sizes, gather = [], owners.all_gather

    def counted(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        gathered = gather(x, dim, group)
        sizes.append(gathered.numel())
        return gathered

    like = [torch.empty(size, dtype=torch.float64) for size in SIZES]
    with patch.object(owners, "all_gather", counted):
        for index, start, piece in on_owners(
            lambda indices: [whole[i].view(SIZES[i]) for i in indices],
            like,
            [0, 1, 0, 0, 1],
            dist.group.WORLD,
            dtype=torch.float64,
            at_once=AT_ONCE,
        ):
            found[index][start : start + len(piece)] += piece
    return found, max(sizes)


@pytest.mark.parametrize("world", [2, 3])
def test_results_are_gathered_in_pieces(pool: Pool, world: int) -> None:
    for found, most in pool.run(results, world=world):
        assert most <= AT_ONCE
        for index, result in enumerate(found):
            assert torch.equal(result, torch.arange(len(result), dtype=torch.float64) + 100 * index)
