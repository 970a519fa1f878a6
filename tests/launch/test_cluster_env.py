"""The place in a run that a launcher's variables give, and what is said where they give none."""

from __future__ import annotations

import socket
import threading

import pytest

from stoker.errors import UserError
from stoker.job.layout import Layout
from stoker.launch.cluster_env import RankInfo, check_world, first_host, rank_info_from_env
from stoker.launch.nodes import addresses

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"} | {
    "MASTER_ADDR": "gpu1",
    "MASTER_PORT": "29400",
}
SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "11",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2),3",
    "SLURM_STEP_NODELIST": "gpu[003-004,9]",
    "SLURM_NODEID": "2",
    "SLURM_PROCID": "9",
    "SLURM_LOCALID": "1",
}


def test_torchrun() -> None:
    assert rank_info_from_env(TORCHRUN) == RankInfo(5, 8, 1, 4)
    assert rank_info_from_env({k: v for k, v in TORCHRUN.items() if k != "LOCAL_WORLD_SIZE"}) == RankInfo(5, 8, 1, 8)


def test_srun() -> None:
    rank_info = rank_info_from_env(SLURM)
    assert rank_info is not None and rank_info.meet is not None
    assert (rank_info.rank, rank_info.world, rank_info.local_rank, rank_info.local_world) == (9, 11, 1, 3)
    assert rank_info.meet[0] == "gpu003" and 15_000 <= rank_info.meet[1] < 32_000
    assert rank_info_from_env({**SLURM, "SLURM_STEP_ID": "1"}).meet != rank_info.meet  # type: ignore[union-attr]
    given = rank_info_from_env({**SLURM, "MASTER_ADDR": "here", "MASTER_PORT": "1234"})
    assert given is not None and given.meet == ("here", 1234)


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"SLURM_JOB_ID": "4711", "SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_NODEID": "0"},  # a job's script
        {**SLURM, "SLURM_STEP_NUM_TASKS": "1"},  # srun --pty bash
        {"MASTER_ADDR": "gpu1", "MASTER_PORT": "29400"},
    ],
)
def test_started_by_itself(environment: dict[str, str]) -> None:
    assert rank_info_from_env(environment) is None


def test_one_process_needs_no_address() -> None:
    assert rank_info_from_env({"RANK": "0", "WORLD_SIZE": "1"}) == RankInfo(0, 1, 0, 1)


def test_what_is_missing_is_named() -> None:
    some = {name: TORCHRUN[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR")}
    with pytest.raises(UserError, match="but LOCAL_RANK and MASTER_PORT are not; set all of RANK"):
        rank_info_from_env(some)
    with pytest.raises(UserError, match="RANK is 'first', not a number"):
        rank_info_from_env({**TORCHRUN, "RANK": "first"})


def test_numbers_that_contradict_each_other_are_refused() -> None:
    """The others would wait for a process that does not exist."""
    for rank in ("8", "-1"):
        with pytest.raises(UserError, match=f"RANK is {rank}, and WORLD_SIZE is 8: ranks count from 0"):
            rank_info_from_env({**TORCHRUN, "RANK": rank})
    for count in ("0", "9"):
        with pytest.raises(UserError, match=f"LOCAL_WORLD_SIZE is {count}, and WORLD_SIZE is 8"):
            rank_info_from_env({**TORCHRUN, "LOCAL_WORLD_SIZE": count})


def test_as_many_processes_as_the_layout_wants() -> None:
    check_world(RankInfo(0, 8, 0, 8), Layout(data=4, tensor=2))
    with pytest.raises(UserError, match=r"started 8 processes, and the job's layout \(data 2 x tensor 2\) needs 4;"):
        check_world(RankInfo(0, 8, 0, 8), Layout(data=2, tensor=2))


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("gpu[003-006,9],login", "gpu003"), ("a,b", "a"), ("n-1-[2,5]", "n-1-2"), ("single", "single"), ("r[1]", "r1")],
)
def test_the_first_of_slurms_nodes(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


def test_rank_0_opens_the_store_that_its_node_did_not() -> None:
    with socket.create_server(("127.0.0.2", 0)) as free:
        port = free.getsockname()[1]
        with pytest.raises(ConnectionError, match=f"cannot listen on 127.0.0.2:{port}"):
            RankInfo(0, 1, 0, 1, ("127.0.0.2", port), node="b").store()
    store = RankInfo(0, 1, 0, 1, ("127.0.0.2", port), node="b").store()
    socket.create_connection(("127.0.0.2", port)).close()
    with pytest.raises(ConnectionRefusedError):  # on its own address only
        socket.create_connection(("127.0.0.1", port))
    del store


@pytest.mark.parametrize("hidden", [False, True])
def test_the_store_of_srun_listens_at_the_address_of_its_host(monkeypatch: pytest.MonkeyPatch, hidden: bool) -> None:
    """Where that host's own name leads to loopback, the others know another address: every interface."""
    monkeypatch.setattr(addresses, "is_loopback", lambda host: hidden)
    with socket.create_server(("127.0.0.2", 0)) as free:
        meet = "127.0.0.2", free.getsockname()[1]
    stores = []
    other = threading.Thread(target=lambda: stores.append(RankInfo(1, 2, 0, 1, meet).store()))
    other.start()
    stores.append(RankInfo(0, 2, 0, 1, meet).store())
    other.join()
    elsewhere = "127.0.0.3", meet[1]
    if hidden:
        socket.create_connection(elsewhere).close()
    else:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(elsewhere)
    assert len(stores) == 2
