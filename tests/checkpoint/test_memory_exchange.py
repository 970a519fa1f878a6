"""Copies that lie on other machines, each of which has a folder of its own, are fetched while a run is restored."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from stoker.checkpoint.chunks import Chunk, Held
from stoker.checkpoint.memory_exchange import fetched
from stoker.checkpoint.memory_restore import steps_in_memory
from stoker.checkpoint.save_plan import make_write_plan
from stoker.checkpoint.shm_buffers import Slot
from stoker.launch.process_pool import Pool

ROWS = 12


def held(first: int, last: int, value: float) -> Held:
    """Rows of a weight that only this process has, and a bias that all have."""
    rows = torch.arange(first, last, dtype=torch.float64)[:, None].expand(-1, 3).clone() + value
    weight = Chunk(rows, (first, 0), (ROWS, 3))
    return {"weight": (weight,), "bias": (Chunk(torch.full((5,), value), (0,), (5,)),)}


def copied(base: Path, nodes: int) -> list[tuple[int, str]]:
    """Every process copies its part into the folder of its node; the nodes' folders have nothing in common."""
    rank, world = dist.get_rank(), dist.get_world_size()
    folder = base / f"node-{rank * nodes // world}"
    (folder / f"rank-{rank}").mkdir(parents=True, exist_ok=True)
    share = ROWS // world
    mine = held(rank * share, (rank + 1) * share, 0.5)
    slot = Slot(folder / f"rank-{rank}", 0)
    slot.fill(7, mine, {"n": 1}, make_write_plan(mine, folder), rank=rank)
    slot.close()
    dist.barrier()
    return [(found.step, found.group) for found in steps_in_memory(folder, None)]


def restored(base: Path, nodes: int, lost: bool) -> tuple[int, bool, list[list[float]], list[float], set[int]]:
    """A group of another size, on other nodes, takes the whole state; also returns whose copies a node fetched."""
    rank, world = dist.get_rank(), dist.get_world_size()
    folder = base / f"node-{rank * nodes // world}"
    folder.mkdir(exist_ok=True)
    dist.barrier()
    found = steps_in_memory(folder, None)
    if lost:
        return len(found), False, [], [], set()
    (copy,) = found
    share = ROWS // world
    mine = held(rank * share, (rank + 1) * share, 0.0)
    had = copy.covers(mine)
    with fetched(copy, folder, mine) as more:
        assert more.covers(mine)
        more.fill(mine)
        dist.barrier()  # others may still fetch into this folder
        came = {int(path.parent.name.removeprefix("rank-")) for path in folder.glob("rank-*/fetched")}
    dist.barrier()
    assert not list(folder.glob("rank-*/fetched")) and copy.numbers == {"n": 1}
    return len(found), had, mine["weight"][0].tensor.tolist(), mine["bias"][0].tensor.tolist(), came


@pytest.mark.parametrize(("after", "world"), [(2, 4), (2, 2), (3, 3), (4, 4)])
def test_a_state_on_two_nodes_is_restored_on_any(pool: Pool, tmp_path: Path, after: int, world: int) -> None:
    assert all(len(found) == 1 for found in pool.run(copied, tmp_path, 2, world=4))
    found = pool.run(restored, tmp_path, after, False, world=world)
    assert all(count == 1 and bias == [0.5] * 5 for count, _, _, bias, _ in found)
    assert not all(had for _, had, *_ in found)
    rows = [row for _, _, rows, _, _ in found for row in rows]
    assert rows == [[number + 0.5] * 3 for number in range(ROWS)]


def test_a_step_of_which_a_copy_is_lost_does_not_count(pool: Pool, tmp_path: Path) -> None:
    pool.run(copied, tmp_path, 2, world=4)
    shutil.rmtree(tmp_path / "node-1" / "rank-3")
    assert pool.run(restored, tmp_path, 2, True, world=2) == [(0, False, [], [], set())] * 2


def test_a_node_fetches_what_its_processes_need_alone(pool: Pool, tmp_path: Path) -> None:
    """Each of four nodes needs the rows of one former process, and the bias, which one of them has."""
    pool.run(copied, tmp_path, 2, world=4)
    fetched = [came for *_, came in pool.run(restored, tmp_path, 4, False, world=4)]
    ranks = [{0, 1}, {2, 3}, set(), set()]  # whose copies were in each node's memory
    bias = set.intersection(*(fetched[node] - {node} for node in (2, 3)))
    assert len(bias) == 1
    assert fetched == [({node} | bias) - ranks[node] for node in range(4)]
