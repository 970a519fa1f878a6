"""The driver that Ray runs as the job: places one supervisor on each node, follows them, and ends with their result.

Started as ``python3 -m stoker.cluster.ray.driver driver.json`` in the folder of the submission, on the cluster.
"""

from __future__ import annotations

import json
import logging
import secrets
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stoker.cluster.ray.placement import Placement
from stoker.cluster.ray.shown_logs import NodeLines, ShownLogs
from stoker.cluster.ray.supervisor_actor import SupervisorActor
from stoker.resilience.deadline import SIGNAL_EXIT

POLL = 1.0  # seconds between two checks of the logs and the supervisors
PRINT_EVERY = 30.0  # seconds between two messages while waiting
MOST_MOVES = 3  # times that a node's supervisor is placed on another node before the job gives up


@dataclass(frozen=True)
class Plan:
    """The driver's input.

    Attributes:
        words: options of `stoker node`, without rendezvous, name and address.
        output: the run's folder, ``FOLDER`` for the folder of runs.
        wait: seconds within which the nodes must be free.
    """

    name: str
    placement: Placement
    words: list[str]
    folder: str
    output: str
    wait: float

    @classmethod
    def read(cls, path: Path) -> Plan:
        """Returns the plan of a file that the submission wrote."""
        values = json.loads(path.read_text())
        return cls(**{**values, "placement": Placement(**values["placement"])})


@dataclass(frozen=True)
class _Move:
    """A supervisor that is to be placed again: its actor's answer, and when that is given up (time.monotonic)."""

    address: Any
    until: float


class Driver:
    """Follows the supervisors of a job from their placement to their end."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._secret = secrets.token_hex(32)  # known to the actors alone
        self._asked = False
        self._shown = ShownLogs()
        self._actors: list[Any] = []
        self._runs: dict[Any, int] = {}
        self._meet: list[str] = []
        self._moving: dict[int, _Move] = {}
        self._moved = [0] * plan.placement.nodes

    def run(self) -> int:
        """Places, starts and follows; the exit code of the job."""
        import ray

        signal.signal(signal.SIGTERM, self._ask)
        ray.init(log_to_driver=False, logging_level=logging.WARNING)
        group = self._placed()
        if group is None:
            return SIGNAL_EXIT + signal.SIGTERM if self._asked else 3
        try:
            return self._followed(group)
        finally:
            ray.util.remove_placement_group(group)

    def _ask(self, *_: Any) -> None:
        self._asked = True

    def _placed(self) -> Any:
        """Returns the placement group once all its bundles are placed; None on a timeout or a request to stop."""
        import ray

        placement = self._plan.placement
        alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        if refusal := placement.refusal(alive):
            _say(f"waiting: {refusal}")
        group = ray.util.placement_group([placement.bundle()] * placement.nodes, strategy="STRICT_SPREAD")
        ready, begun, printed = group.ready(), time.monotonic(), time.monotonic()
        while not ray.wait([ready], timeout=POLL)[0]:
            now = time.monotonic()
            if self._asked or now - begun > self._plan.wait:
                ray.util.remove_placement_group(group)
                _say("asked to stop" if self._asked else f"not placed within {self._plan.wait:g} s")
                return None
            if now - printed > PRINT_EVERY:
                printed = now
                free = ", ".join(f"{v:g} {k}" for k, v in ray.available_resources().items() if k in ("CPU", "GPU"))
                _say(f"waiting until {placement.nodes} nodes are free at once (free now: {free or 'nothing'})")
        return group

    def _followed(self, group: Any) -> int:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        placement = self._plan.placement
        kind = ray.remote(SupervisorActor)
        for index in range(placement.nodes):
            strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
            self._actors.append(
                kind.options(
                    num_cpus=placement.cpus,
                    num_gpus=placement.gpus,
                    resources=dict(placement.resources),
                    scheduling_strategy=strategy,
                    max_concurrency=4,
                    max_restarts=-1,
                ).remote(self._plan.folder)
            )
        try:
            places = ray.get([self._address(index) for index in range(placement.nodes)])
        except ray.exceptions.RayError as error:
            _say(f"a node's supervisor does not start: {_cause(error)}")
            return 1
        _say("placed on " + ", ".join(f"{host} ({address})" for host, address, _ in places))
        self._meet = [f"{address}:{port}" for _, address, port in places]
        for index, (host, _, _) in enumerate(places):
            self._start(index, host)
        codes: dict[int, int] = {}
        stopping = False
        while self._runs or (self._moving and 0 not in codes.values()):
            waiting = [*self._runs, *(move.address for move in self._moving.values())]
            done, _ = ray.wait(waiting, timeout=POLL)
            for reference in done:
                if reference not in self._runs:
                    continue
                index = self._runs.pop(reference)
                try:
                    codes[index] = ray.get(reference)
                except ray.exceptions.RayError as error:
                    self._move(index, _cause(error), codes)
            self._look_for_moved(codes)
            if self._asked and not stopping:
                stopping = True
                _say("stopping")
                for index in self._runs.values():
                    self._actors[index].stop.remote()
            self._show()
        self._show()
        _say("; ".join(f"node {index} ended with exit code {code}" for index, code in sorted(codes.items())))
        return 0 if 0 in codes.values() else max(codes.values(), default=1)

    def _address(self, index: int) -> Any:
        """Asks a supervisor for its place; Ray asks again whenever it has to place the actor again."""
        return self._actors[index].address.options(max_task_retries=-1).remote()

    def _start(self, index: int, host: str) -> None:
        words = [*self._plan.words, "--rendezvous", ",".join(self._meet), "--name", f"{host}-{index}"]
        words += ["--listen", self._meet[index]]  # several of Ray's nodes may be on one machine
        self._runs[self._actors[index].run.remote(words, self._secret, f"{host}-{index}")] = index

    def _move(self, index: int, why: str, codes: dict[int, int]) -> None:
        """Handles the loss of a node: Ray places its bundle on another one, where its supervisor joins the others."""
        if self._asked or not self._runs or self._moved[index] >= MOST_MOVES:
            codes[index] = 1
            return
        self._moved[index] += 1
        _say(f"node {index} is gone ({why[:120]}); another takes its place when one is free")
        until = time.monotonic() + self._plan.wait
        self._moving[index] = _Move(self._address(index), until)

    def _look_for_moved(self, codes: dict[int, int]) -> None:
        """Starts the supervisors of actors that Ray has placed again."""
        import ray

        for index, move in list(self._moving.items()):
            if self._asked or time.monotonic() > move.until:
                del self._moving[index]
                codes[index] = 1
                continue
            if not ray.wait([move.address], timeout=0)[0]:
                continue
            del self._moving[index]
            try:
                host, address, port = ray.get(move.address)
            except ray.exceptions.RayError:  # Ray does not place it again
                codes[index] = 1
                continue
            self._meet[index] = f"{address}:{port}"
            _say(f"node {index} goes on as {host} ({address})")
            self._start(index, host)

    def _show(self) -> None:
        """Prints new lines of the logs."""
        asked = [actor.lines.remote(self._plan.output, self._shown.read) for actor in self._actors]
        for line in self._shown.take(self._answered(asked)):
            print(line, flush=True)

    def _answered(self, asked: Sequence[Any]) -> Iterator[NodeLines]:
        """Yields the answers of the nodes that answer now; what a late one has seen is asked for again."""
        import ray

        for reference in asked:
            try:
                yield ray.get(reference, timeout=POLL * 5)
            except (ray.exceptions.RayError, ray.exceptions.GetTimeoutError):
                continue


def _cause(error: Exception) -> str:
    """Returns the line of an error of Ray that names the cause: the last one where Ray shows a traceback."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1 if any(line.startswith("File ") for line in lines) else 0][:300]


def _say(text: str) -> None:
    print(f"stoker | {text}", flush=True)


if __name__ == "__main__":
    sys.exit(Driver(Plan.read(Path(sys.argv[1]))).run())
