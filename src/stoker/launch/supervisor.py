"""Starts a run's processes on this machine, restarts them after a failure, and reports their outcome."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

from stoker.job.task_spec import is_language
from stoker.launch.cluster_env import LOOPBACK
from stoker.launch.forkserver import start_server
from stoker.launch.nodes.agent import Agent
from stoker.launch.nodes.cache_exchange import CacheServer
from stoker.launch.nodes.channel import Message, PeerNetwork
from stoker.launch.nodes.group import Group, Node
from stoker.launch.nodes.leader import Leader
from stoker.launch.nodes.leader_effects import LeaderEffects
from stoker.launch.nodes.node_supervisor import NodeSupervisor
from stoker.launch.nodes.place import Place
from stoker.launch.run_spec import RunSpec
from stoker.resilience.stop_signals import handled_by
from stoker.runs.shared_memory import shared_memory
from stoker.runs.shm_folder import SharedFolder
from stoker.terminal import show_cursor, unescaped
from stoker.train.run_result import RunResult

POLL = 0.05  # seconds between two looks at the processes


def train_here(spec: RunSpec, *, nccl: bool) -> RunResult:
    """Trains in as many processes as the layout has; the caller holds the lock of the run's folder.

    If a process dies or stops, the others are ended, and all are restarted from the newest state, according to the
    job's `faults`. The first SIGINT, SIGTERM or SIGHUP is forwarded to all of them, which stop after their step; a
    second ends them, and so does the deadline after a SIGTERM.

    Args:
        nccl: whether the processes communicate through NCCL.

    Raises:
        UserError: a process raised one; of the same class, with the same message.
        RankFailed: a process met a bug or was killed.
        Interrupted: a signal ended the processes before they had an outcome.
    """
    spec.logs.mkdir(parents=True, exist_ok=True)
    asked: list[int] = []
    with shared_memory(spec.output) as shared, handled_by(lambda number, _: asked.append(number)):
        start_server(language=is_language(spec.loaded.job))
        return _alone(spec, shared, asked, nccl=nccl)


def train_on_nodes(
    spec: RunSpec,
    place: Place,
    network: PeerNetwork,
    take: Callable[[], AbstractContextManager[bool]],
    cache: CacheServer,
    *,
    nccl: bool,
) -> RunResult:
    """Trains as one node of several, each with a supervisor; see `stoker.launch.nodes.node_supervisor`.

    Args:
        spec: the whole job, as it runs with all nodes.
        take: takes the run's folder, on the node that leads; yields whether it is new.
        cache: serves objects of this node's cache to other nodes.
        nccl: whether the processes communicate through NCCL.

    Raises:
        UserError, RankFailed, Interrupted: as `train_here`, on every node.
    """
    asked: list[int] = []
    with handled_by(lambda number, _: asked.append(number)):
        start_server(language=is_language(spec.loaded.job))
        supervisor = NodeSupervisor(
            spec,
            place,
            network,
            asked=asked,
            take=take,
            say=lambda text: print_above_progress(spec, text),
            nccl=nccl,
            cache=cache,
        )
        try:
            return supervisor.run()
        finally:
            network.close()
            show_cursor(sys.stdout)


def print_above_progress(spec: RunSpec, text: str) -> None:
    """Prints a message without breaking the live progress line."""
    if not spec.quiet:
        if sys.stdout.isatty():
            unescaped(sys.stdout).write("\r\x1b[2K")
        print(text, flush=True)


def _alone(spec: RunSpec, shared: SharedFolder, asked: list[int], *, nccl: bool) -> RunResult:
    """Returns the supervisor of the only node: its leader and its processes in one loop, without a channel."""
    listed: list[Message] = []
    agent = Agent(name="", address=LOOPBACK, secret=None, tell=listed.append, nccl=nccl)
    me = Node("", (LOOPBACK, 0), tuple(range(spec.layout.world)))

    def send(_: str, message: Message) -> None:
        match message["kind"]:
            case "start":
                agent.start(leader.spec, Group.of(message["group"]), shared)
            case "end":
                agent.end(message["grace"])
            case "stacks":
                agent.stacks()
            case "signal":
                agent.hand_on(message["numbers"])

    def no_store(_: Node) -> tuple[str, int]:
        raise AssertionError

    effects = LeaderEffects(send, lambda text: print_above_progress(spec, text), lambda: "here", lambda: None, no_store)
    leader = Leader(spec, effects, me=me, least=1, most=1, nccl=nccl, now=time.monotonic())
    heard = 0
    try:
        while True:
            if len(asked) > heard:
                heard = len(asked)
                leader.message("", {"kind": "signals", "numbers": list(asked)}, time.monotonic())
            agent.look(time.monotonic())
            while listed:
                leader.message("", listed.pop(0), time.monotonic())
            leader.tick(time.monotonic())
            if isinstance(leader.outcome, RunResult):
                return leader.outcome
            if leader.outcome is not None:
                show_cursor(sys.stdout)
                raise leader.outcome
            agent.wait(POLL)
    finally:
        agent.abandon()
