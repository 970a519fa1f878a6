"""A pool of processes: results by rank, groups of their own, errors told, hangs and deaths survived."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from stoker.errors import CannotRun, Problem, UserError
from stoker.job.layout import Layout
from stoker.launch.first_failure import RankFailed
from stoker.launch.process_pool import Pool
from stoker.parallel.mesh import Mesh

pytestmark = pytest.mark.pool


def summed(value: torch.Tensor) -> tuple[int, int, torch.Tensor]:
    """The sum over the ranks of value x (rank + 1)."""
    total = value * (dist.get_rank() + 1)
    dist.all_reduce(total)
    return dist.get_rank(), dist.get_world_size(), total


def alone() -> tuple[bool, int, float]:
    return dist.is_initialized(), torch.get_num_threads(), torch.rand(()).item()


def process_id() -> int:
    return os.getpid()


def threads() -> int:
    return psutil.Process().num_threads()


def split_sum(size: int) -> float:
    """Computes with a tensor over a mesh: PyTorch caches what it needs for that."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return float(distribute_tensor(torch.ones(size), mesh, [Shard(0)]).sum().full_tensor())


def refuse(ranks: set[int], kind: type[UserError]) -> None:
    if dist.get_rank() in ranks:
        raise kind(Problem("too large", "write 2", file="job.yaml", line=3, column=1))
    dist.barrier()


def left_waiting() -> None:
    """Rank 1 comes too late to a collective of a mesh's group."""
    group = Mesh(Layout(tensor=2), torch.device("cpu")).groups["tensor"]
    if dist.get_rank():
        time.sleep(2.5)
    dist.all_reduce(torch.ones(1), group=group)


def stumble(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ZeroDivisionError("a bug")
    dist.barrier()


def hang(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(600)


def die(rank: int) -> None:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_answer_in_order_each_call_in_a_group_of_its_own(pool: Pool, world: int) -> None:
    for _ in range(2):
        results = pool.run(summed, torch.ones(3), world=world)
        assert [(rank, size) for rank, size, _ in results] == [(rank, world) for rank in range(world)]
        assert all(torch.equal(total, torch.full((3,), world * (world + 1) / 2)) for *_, total in results)


def test_one_rank_has_no_group_and_one_thread(pool: Pool) -> None:
    torch.manual_seed(0)
    assert pool.run(alone, world=1) == [(False, 1, torch.rand(()).item())]


def test_processes_are_kept(pool: Pool) -> None:
    assert pool.run(process_id, world=2) == pool.run(process_id, world=2)


def test_threads_of_groups_end_with_the_call(pool: Pool) -> None:
    counts = []
    for size in (4, 6, 8):
        assert pool.run(split_sum, size, world=2) == [size, size]
        counts.append(pool.run(threads, world=2))
    assert counts[1:] == counts[:1] * 2


@pytest.mark.parametrize("kind", [UserError, CannotRun])
def test_what_all_ranks_refuse_is_told_once(pool: Pool, kind: type[UserError]) -> None:
    before = pool.run(process_id, world=2)
    with pytest.raises(kind) as caught:
        pool.run(refuse, {0, 1}, kind, world=2)
    assert str(caught.value) == "job.yaml:3:1: too large; write 2" and type(caught.value) is kind
    assert pool.run(process_id, world=2) == before  # nobody hung: they all go on


def test_what_one_rank_refuses_names_the_rank(pool: Pool) -> None:
    with pytest.raises(UserError, match=r"^job.yaml:3:1: rank 1: too large; write 2$"):
        pool.run(refuse, {1}, UserError, world=2)


def test_the_first_bug_comes_back_with_its_traceback(pool: Pool) -> None:
    """The others wait for the rank in a collective; what they say of it is not what is told."""
    with pytest.raises(RankFailed, match=r"^rank 1: ZeroDivisionError: a bug") as caught:
        pool.run(stumble, 1, world=3)
    assert "in stumble" in caught.value.__notes__[0]
    assert len(pool.run(summed, torch.ones(1), world=3)) == 3


def test_a_rank_that_hangs_is_replaced() -> None:
    with Pool(2) as pool:
        before = pool.run(process_id)
        with pytest.raises(TimeoutError, match=r"ranks \[1\] of 2 did not end within 1 s"):
            pool.run(hang, 1, timeout=1)
        after = pool.run(process_id)
        assert after[0] == before[0] and after[1] != before[1]


def test_a_group_of_a_mesh_waits_as_long_as_the_call_says(pool: Pool) -> None:
    with pytest.raises(RankFailed, match=r"^rank 0: RuntimeError: .*Timed out waiting"):
        pool.run(left_waiting, world=2, timeout=60, wait=1)


def test_a_rank_that_is_killed_is_named_and_replaced(pool: Pool) -> None:
    with pytest.raises(RankFailed, match=r"^rank 0: process \d+ was killed by SIGKILL"):
        pool.run(die, 0, world=2)
    assert len(pool.run(summed, torch.ones(1), world=2)) == 2


OWNER = """
import os, sys, time
import stoker.launch.process_pool
from stoker.launch import forkserver
del forkserver.PRELOADED[1:], forkserver.FOR_LANGUAGE[:]  # how the server ends is needed, and loads nothing
pool = stoker.launch.process_pool.Pool(2)
print(*pool.run(os.getpid), flush=True)
if sys.argv[1] == "hang":
    pool.run(time.sleep, 600)
"""


@pytest.mark.parametrize("how", [pytest.param("ends", marks=pytest.mark.slow), "killed"])
@pytest.mark.slow
def test_no_process_outlives_its_pool(how: str) -> None:
    mode = "hang" if how == "killed" else "-"
    owner = subprocess.Popen([sys.executable, "-c", OWNER, mode], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    ranks = [int(word) for word in owner.stdout.readline().split()]
    if how == "killed":
        owner.kill()
    owner.wait(timeout=30)
    deadline = time.monotonic() + 5
    while any(map(psutil.pid_exists, ranks)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(ranks) == 2 and not any(map(psutil.pid_exists, ranks))
