"""The processes of one node: starts, watches and ends them on the leader's command, and reports to the leader."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from itertools import repeat
from typing import Any

from stoker.frames import derived, new_secret
from stoker.launch.cluster_env import RankInfo
from stoker.launch.nodes.cache_exchange import NodePeers
from stoker.launch.nodes.channel import Message
from stoker.launch.nodes.group import Group
from stoker.launch.processes import Processes
from stoker.launch.run_spec import RunSpec
from stoker.launch.shrink import left_out
from stoker.resilience.deadline import seconds_left
from stoker.resilience.driver_log import DriverLog, GpuFault, gpu_faults, read_addresses
from stoker.resilience.heartbeat import Listener, Pulse
from stoker.resilience.stack_dumps import ask_for_stacks, waits_for_others
from stoker.runs.shm_folder import SharedFolder
from stoker.train.run_result import RunResult

EVERY = 0.1  # seconds between two looks at the heartbeats
NODES_A_SECOND = 100  # that tell the leader of their heartbeats
RARELY = 10.0  # seconds between a node's reports, at most
LEFT = ("heart-*", "gpu-*", "meet-*", "rank-*/*.arriving", "rank-*/fetched")  # of processes that were killed


def interval(nodes: int) -> float:
    """Seconds between two reports of a node to the leader."""
    return min(RARELY, max(0.5, nodes / NODES_A_SECOND)) if nodes > 1 else 0.0


class Agent:
    """The processes of one node.

    Args:
        name: name of the node; empty if it is the only one.
        address: that the processes bind to.
        secret: the nodes' shared secret; None with a single node.
        tell: sends messages to the leader.
        nccl: whether the processes communicate through NCCL.
    """

    def __init__(
        self,
        *,
        name: str,
        address: str,
        secret: bytes | None,
        tell: Callable[[Message], None],
        nccl: bool,
    ) -> None:
        self._name, self._address, self._secret = name, address, secret
        self._tell, self._nccl = tell, nccl
        self._asked: list[int] = []
        self._processes: Processes | None = None
        self._deadline: float | None = None
        self._driver_log = DriverLog()

    def start(self, spec: RunSpec, group: Group, shared: SharedFolder, listening: socket.socket | None = None) -> None:
        """Starts the processes of this node's ranks in the group."""
        member = group.member(self._name)
        assert member is not None and self._processes is None
        self._spec, self._shared, self._ranks = spec, shared, member.ranks
        self._interval = interval(len(group.members))
        for rank in member.ranks:
            spec.failure_of(rank).unlink(missing_ok=True)
        shared.keep()
        for pattern in LEFT:
            for left in shared.path.glob(pattern):
                left.unlink(missing_ok=True)
        key = new_secret() if self._secret is None else derived(self._secret, "objects", group.generation, group.mark)
        peers = NodePeers.of(group, self._name, self._address, self._secret) if self._secret else None
        ranks = [
            RankInfo(
                rank,
                group.world,
                local_rank,
                member.count,
                group.store or shared.path / f"meet-{group.generation}",
                node=self._name,
                address=self._address,
                listening=listening if rank == 0 else None,
                peers=peers,
                device=device,
            )
            for rank, local_rank, device in member.processes
        ]
        self._listener = Listener(shared.path)
        self._sent: dict[int, Pulse] = {}
        self._looked = self._reported = 0.0
        self._has_told = False
        self._processes = Processes(spec, ranks, key, asked=self._asked)
        self._processes.start()

    def wait(self, seconds: float) -> None:
        """Waits until a process ends, at most ``seconds``."""
        if self._processes is not None:
            self._processes.wait(seconds)
        else:
            time.sleep(seconds)

    def look(self, now: float) -> None:
        """Polls the processes; call it repeatedly."""
        processes = self._processes
        if processes is None:
            return
        processes.look()
        self._shared.keep()
        self._report(now)
        if self._is_late(now):
            processes.kill()
        if processes.one_has_failed and not self._has_told:
            self._has_told = True
            self._tell({"kind": "failing", "killed": processes.killed})
        if not processes.pids:
            self._finish(processes)

    def end(self, grace: float) -> None:
        """Has the processes ended after ``grace`` seconds."""
        if self._processes is not None:
            self._processes.end(grace)

    def pause(self) -> None:
        """Asks the processes to stop after their step."""
        if self._processes is not None:
            self._processes.pause()

    def hand_on(self, numbers: Sequence[int]) -> None:
        """Forwards the signals that have not been forwarded yet; ``numbers`` are all so far."""
        self._asked += numbers[len(self._asked) :]

    def stacks(self) -> None:
        """Makes the processes write their stacks, and reports to the leader which of them wait for others."""
        if self._processes is None:
            return
        pids = self._processes.pids
        stacks = ask_for_stacks(pids, folder=self._shared.path, logs=self._spec.logs, collectives=self._nccl)
        waits = [rank for rank, text in stacks.texts.items() if waits_for_others(text)]
        files = [path.name for path in stacks.files]
        self._tell({"kind": "stacks", "waits": waits, "files": files, "pids": [[*pair] for pair in pids.items()]})

    def abandon(self) -> None:
        """Kills the processes, without a report."""
        if self._processes is not None:
            self._processes.kill()
            self._listener.close()
            self._processes = None

    def _report(self, now: float, *, at_once: bool = False) -> None:
        """Sends new heartbeats to the leader."""
        if now - self._looked < EVERY and not at_once:
            return
        self._looked = now
        if now - self._reported < self._interval and not at_once:
            return
        found = {rank: self._listener.pulse(rank) for rank in self._ranks}
        pulses = {rank: pulse for rank, pulse in found.items() if pulse is not None}
        new = {rank: pulse for rank, pulse in pulses.items() if self._sent.get(rank) != pulse}
        if new:
            self._reported, self._sent = now, pulses
            self._tell(message_of(new, now))

    def _is_late(self, now: float) -> bool:
        """Returns whether the deadline after a SIGTERM has passed; later saves do not count."""
        if signal.SIGTERM not in self._asked:
            return False
        if self._deadline is None:
            self._deadline = now + seconds_left(self._spec.loaded.job.faults)
        return now > self._deadline

    def _finish(self, processes: Processes) -> None:
        """Reports the outcome of the processes to the leader."""
        processes.look()
        processes.kill()  # all have ended; none is left unjoined
        self._report(time.monotonic(), at_once=True)
        self._listener.close()
        self._processes = None
        result = processes.ending()
        reported = self._spec.failures(self._ranks) if result is None else []
        if result is None:
            reported += processes.failures({failure.rank for failure in reported})
        failures = [asdict(failure) for failure in reported]
        faults = self._gpu_faults() if result is None else []
        out = sorted({*left_out(self._spec), *(fault.rank for fault in faults or () if fault.lost)})
        found = None if faults is None else [asdict(fault) for fault in faults]
        self._tell(ended_message(result=result, failures=failures, gpu_faults=found, out=out))

    def _gpu_faults(self) -> list[GpuFault] | None:
        """Returns the faults of this node's GPUs since the last start; None if the driver's messages cannot be read."""
        messages = self._driver_log.read()
        return None if messages is None else gpu_faults(messages, read_addresses(self._shared.path, self._ranks))


def ended_message(
    *,
    result: RunResult | None = None,
    failures: Sequence[dict[str, Any]] = (),
    gpu_faults: Sequence[dict[str, Any]] | None = (),
    out: Sequence[int] = (),
) -> Message:
    """Returns a node's final report about a start, whose processes have ended.

    Args:
        result: the run's result; None if a process failed.
        gpu_faults: None if the driver's messages cannot be read.
        out: ranks whose devices are to be left out.
    """
    plain = asdict(result) if result is not None else None
    return {"kind": "ended", "result": plain, "failures": failures, "gpu_faults": gpu_faults, "out": out}


def message_of(pulses: Mapping[int, Pulse], now: float) -> Message:
    """Returns a message with heartbeats by rank: their ages instead of their moments, as clocks differ.

    A field is a list, or one value where all processes have the same, as they mostly do: the leader of a thousand nodes
    has less to parse.
    """
    ages = [round(now - pulse.beat, 4) for pulse in pulses.values()]
    _, *others = zip(*pulses.values(), strict=True)
    fields = [column[0] if column.count(column[0]) == len(column) else [*column] for column in others]
    return {"kind": "pulses", "ranks": [*pulses], "ages": ages, "fields": fields}


def pulses_of(message: Message, now: float) -> dict[int, Pulse]:
    """Returns the heartbeats of a message of `message_of`, by rank."""
    columns = [field if isinstance(field, list) else repeat(field) for field in message["fields"]]
    pulses = map(Pulse, [now - age for age in message["ages"]], *columns)  # `repeat` has no end
    return dict(zip(map(int, message["ranks"]), pulses, strict=True))
