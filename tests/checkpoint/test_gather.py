"""Whole tensors from chunks of any type and place; an error of one process is everybody's."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from stoker.checkpoint.chunks import Chunk
from stoker.checkpoint.gather import gather_whole
from stoker.checkpoint.object_collectives import by_first, run_on_all_ranks
from stoker.errors import RunFailed
from stoker.launch.process_pool import Pool

WHOLE = {
    "columns": torch.arange(12.0).view(3, 4).to(torch.bfloat16),
    "counter": torch.tensor(7),
    "empty": torch.zeros(0, 2),
    "rows": torch.arange(10).view(5, 2),
}


def gather() -> dict[str, Tensor]:
    at = dist.get_rank()
    start, stop = (0, 0, 1)[at], (0, 1, 4)[at]
    held = {"columns": [Chunk(WHOLE["columns"][:, start:stop], (0, start), (3, 4))]}
    if at == 2:  # names that the first process does not have
        held |= {name: [Chunk.whole(WHOLE[name])] for name in ("counter", "empty")}
    if at != 1:
        held["rows"] = [Chunk.whole(WHOLE["rows"])]
    return gather_whole(held)


def test_chunks_of_any_process_come_together_on_the_first(pool: Pool) -> None:
    first, *others = pool.run(gather, world=3)
    assert others == [{}, {}] and first.keys() == WHOLE.keys()
    for name, tensor in WHOLE.items():
        assert first[name].dtype == tensor.dtype and torch.equal(first[name], tensor)
    assert torch.equal(gather_whole({"rows": [Chunk.whole(WHOLE["rows"])]})["rows"], WHOLE["rows"])


def gather_with_a_gap() -> None:
    at = dist.get_rank()
    gather_whole({"rows": [Chunk(WHOLE["rows"][2 * at : 2 * at + 2], (2 * at, 0), (5, 2))]})


def test_a_gap_is_a_bug(pool: Pool) -> None:
    with pytest.raises(Exception, match="rows: no process holds some of it"):
        pool.run(gather_with_a_gap, world=2)


class Unsendable(Exception):
    """Cannot be read in another process: it takes two arguments and hands on one."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(first + second)


def fail(kind: str) -> tuple[list[int], int, str, str]:
    at = dist.get_rank()

    def work() -> int:
        if at > 0:
            raise {"own": RunFailed(f"rank {at} ran out"), "odd": Unsendable("rank ", str(at))}[kind]
        return at

    results, first = run_on_all_ranks(lambda: 10 * at), by_first(lambda: at + 5)
    try:
        run_on_all_ranks(work)
    except Exception as error:
        return results, first, type(error).__name__, str(error)
    raise AssertionError("nobody heard of it")


def test_the_first_error_is_raised_on_all(pool: Pool) -> None:
    assert pool.run(fail, "own", world=3) == [([0, 10, 20], 5, "RunFailed", "rank 1 ran out")] * 3
    kinds = [answer[2:] for answer in pool.run(fail, "odd", world=3)]
    assert kinds == [("RunFailed", "Unsendable: rank 1"), ("Unsendable", "rank 1"), kinds[0]]
