"""Rank and world size from a launcher's environment variables: torchrun's, srun's, or those of a compatible one."""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from stoker import sockets
from stoker.errors import Problem, UserError
from stoker.job.layout import Layout
from stoker.node_cache.cache_peers import CachePeers

if TYPE_CHECKING:
    import torch.distributed as dist

LOOPBACK = "127.0.0.1"
MEET = 600.0  # timeout in seconds of the rendezvous of all processes of one start
FIRST_PORT, PORTS = 15_000, 17_000  # of Slurm jobs: below the range of ephemeral ports


@dataclass(frozen=True)
class RankInfo:
    """One process of a run.

    Attributes:
        rank, world: rank and world size.
        local_rank, local_world: its rank on its machine, and the number of processes there.
        meet: host and port of the rendezvous store, or its file, which does not exist yet, in a folder private to this
            user, if all processes run on one machine; None for the environment's MASTER_ADDR and MASTER_PORT.
        agent: whether torchrun's agents host the store, and keep it over restarts of the processes.
        node: name of its node among several supervisors; empty with a single one, or none.
        address: that the process groups bind to.
        listening: the store's socket, for rank 0 of several nodes; None where that process opens it.
        peers: other nodes, which are asked for objects at URLs before their origin.
        device: number of its device on its machine; None for `local_rank`. They differ after an earlier device is left
            out.
    """

    rank: int
    world: int
    local_rank: int
    local_world: int
    meet: tuple[str, int] | Path | None = None
    agent: bool = False
    node: str = ""
    address: str = LOOPBACK
    listening: socket.socket | None = None
    peers: CachePeers | None = None
    device: int | None = None

    @property
    def device_number(self) -> int:
        """Number of the process' device: an index of `parallel.devices` if the job has them, else of the machine's."""
        return self.local_rank if self.device is None else self.device

    @property
    def nodes(self) -> int:
        """Nodes with equally many processes; 1 if they have different numbers."""
        return self.world // self.local_world if self.world % self.local_world == 0 else 1

    @property
    def speaks(self) -> bool:
        """Returns whether this process reports errors that occur on its whole machine before the group exists."""
        return self.local_rank == 0

    def store(self) -> dist.Store | None:
        """Opens the rendezvous store; None if `torch.distributed` finds it by itself."""
        if self.meet is None:
            return None
        import torch.distributed as dist

        if isinstance(self.meet, Path):
            return dist.FileStore(str(self.meet), self.world)
        host, port = self.meet
        if self.agent:
            from stoker.launch.rendezvous import private_store

            store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False)
            return private_store(store, rank=self.rank, world=self.world, timeout=MEET)
        if self.node:
            opened = self.listening
            if opened is None and self.rank == 0:  # the leader's node has no ranks
                opened = _open_store(host, port)
            listening = opened.detach() if opened is not None else None
            wait = timedelta(seconds=MEET)
            return dist.TCPStore(
                host, port, self.world, is_master=self.rank == 0, timeout=wait, master_listen_fd=listening
            )
        listening, own = None, LOOPBACK
        if self.local_world == self.world:
            host = LOOPBACK
        elif self.rank == 0:
            own = _own_address(host)
        if self.rank == 0 and own:
            listening = _open_store(own, port).detach()
        return dist.TCPStore(host, port, self.world, is_master=self.rank == 0, master_listen_fd=listening)


def _own_address(host: str) -> str:
    """Returns the address of this machine to which the name of the store's host leads.

    Empty if it leads to none, as behind an address translation, to several, or to loopback, as Debian's /etc/hosts has
    it, where other machines may know another address: the store then listens on every interface.
    """
    from stoker.launch.nodes.addresses import all_addresses, is_loopback, is_own

    address, *others = all_addresses(host)
    return address if not others and is_own(address) and not is_loopback(address) else ""


def _open_store(host: str, port: int) -> socket.socket:
    """Opens the rendezvous store's socket on this host.

    Raises:
        ConnectionError: the port is taken; the next start has another one.
    """
    try:
        return sockets.listen((host, port))
    except OSError as error:
        raise ConnectionError(f"the rendezvous store cannot listen on {host}:{port} ({error.strerror})") from error


def rank_info_from_env(environment: Mapping[str, str]) -> RankInfo | None:
    """Returns this process' rank in a launcher's environment; None if no launcher started it.

    Raises:
        UserError: the variables are incomplete, are not numbers, or contradict each other.
    """
    if "RANK" in environment and "WORLD_SIZE" in environment:
        return _from_torchrun(environment)
    if "SLURM_STEP_ID" in environment and int(environment.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        return _from_slurm(environment)
    return None  # also in a Slurm job's script outside of srun: one process, which starts the others


def check_world(rank_info: RankInfo, layout: Layout) -> None:
    """Raises UserError unless the launcher started as many processes as the layout needs."""
    if rank_info.world != layout.world:
        raise UserError(
            Problem(
                f"the launcher started {rank_info.world} processes, and the job's layout ({layout.describe()}) needs "
                f"{layout.world}",
                f"start {layout.world}, or change `parallel`; without RANK and WORLD_SIZE in the environment "
                "stoker starts them itself",
            )
        )


def _from_torchrun(environment: Mapping[str, str]) -> RankInfo:
    wanted = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"]
    if environment["WORLD_SIZE"] == "1":
        wanted = wanted[:2]
    missing = [name for name in wanted if name not in environment]
    if missing:
        are = "are" if len(missing) > 1 else "is"
        raise UserError(
            Problem(
                f"RANK and WORLD_SIZE are set, as a launcher sets them, but {' and '.join(missing)} {are} not",
                "set all of " + ", ".join(wanted) + ", or none of them: stoker then starts the processes itself",
            )
        )
    rank, world, local_rank, local_world = (
        _number(environment, name, default)
        for name, default in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", None))
    )
    if not 0 <= rank < world:
        raise UserError(f"the environment variable RANK is {rank}, and WORLD_SIZE is {world}: ranks count from 0")
    if not 1 <= local_world <= world:
        raise UserError(f"the environment variable LOCAL_WORLD_SIZE is {local_world}, and WORLD_SIZE is {world}")
    return RankInfo(rank, world, local_rank, local_world)


def _number(environment: Mapping[str, str], name: str, default: int | None) -> int:
    """Returns a variable's number; without a default that of WORLD_SIZE, as on one machine."""
    if name not in environment:
        return int(environment["WORLD_SIZE"]) if default is None else default
    try:
        return int(environment[name])
    except ValueError:
        raise UserError(f"the environment variable {name} is {environment[name]!r}, not a number") from None


def _from_slurm(environment: Mapping[str, str]) -> RankInfo:
    tasks = _expand_counts(environment["SLURM_STEP_TASKS_PER_NODE"])
    job, step = int(environment["SLURM_JOB_ID"]), int(environment["SLURM_STEP_ID"])
    host = environment.get("MASTER_ADDR") or first_host(environment["SLURM_STEP_NODELIST"])
    port = int(environment.get("MASTER_PORT") or FIRST_PORT + (job * 31 + step) % PORTS)
    return RankInfo(
        int(environment["SLURM_PROCID"]),
        int(environment["SLURM_STEP_NUM_TASKS"]),
        int(environment["SLURM_LOCALID"]),
        tasks[int(environment["SLURM_NODEID"])],
        (host, port),
    )


def first_host(nodes: str) -> str:
    """Returns the first node of Slurm's list: ``gpu[003-006,9],login`` -> ``gpu003``."""
    match = re.match(r"([^\[,]+)(?:\[(\w+))?", nodes)
    assert match is not None, nodes
    return match[1] + (match[2] or "")


def _expand_counts(text: str) -> list[int]:
    """Returns the tasks of each node from Slurm's text: ``4(x2),3`` -> [4, 4, 3]."""
    counts = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(count) for count, times in counts for _ in range(int(times or 1))]
