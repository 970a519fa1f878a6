"""Starts `stoker node` several times on loopback addresses of this machine, each as if it were a machine."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch

from made_module import made_module
from stoker.checkpoint.dcp_store import Store
from stoker.runs.run_folder import RunFolder

STEPS = 60
JOB = """
task: module
module: {model: "made:network", loss: "torch.nn.functional:mse_loss", data: "made:data"}
steps: 60
output: run
train: {batch: 12, precision: fp64}
parallel: {data: %d}
checkpoint: {every: 25, best: false, memory: 1}
faults: {back_off: 0.2, hang: 4}
"""
MADE = made_module()


def command(base: Path, words: list[str], log: Path, pause: float = 0.0) -> subprocess.Popen[bytes]:
    """``stoker WORDS`` in a session of its own."""
    paths = os.pathsep.join([str(base), os.environ.get("PYTHONPATH", "")])
    own = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths, "PAUSE": str(pause)}
    with log.open("ab") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "stoker", *words],
            cwd=base,
            env=own,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )


def prepare(base: Path, world: int) -> None:
    (base / "job.yaml").write_text(JOB % world)
    (base / "made.py").write_text(MADE)


def free_port() -> int:
    with socket.create_server(("127.0.0.2", 0)) as free:
        return int(free.getsockname()[1])


class Nodes:
    """The nodes of a run; node ``n1`` listens on 127.0.0.2, ``n2`` on 127.0.0.3, and so on."""

    def __init__(self, base: Path, count: int, *, nodes: str = "", devices: int = 2, pause: float = 0.01) -> None:
        self.base, self.devices, self.pause = base, devices, pause
        prepare(base, count * devices)
        self.nodes = nodes or str(count)
        self.port = free_port()
        self.rendezvous = ",".join(f"127.0.0.{2 + at}:{self.port}" for at in range(count))
        self.secret = base / "secret"
        self.secret.write_text(secrets.token_hex(32))
        self.secret.chmod(0o600)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.run = RunFolder(base / "run")

    def start(self, number: int, *words: str, secret: Path | None = None) -> subprocess.Popen[bytes]:
        name = f"n{number}"
        own = ["--rendezvous", self.rendezvous, "--secret", str(secret or self.secret), "--nodes", self.nodes]
        own += ["--devices", str(self.devices), "--name", name, "--listen", f"127.0.0.{1 + number}"]
        self.processes[name] = command(self.base, ["node", "job.yaml", *own, *words], self.log(name), self.pause)
        return self.processes[name]

    def start_all(self, count: int) -> None:
        for number in range(1, count + 1):
            self.start(number)

    def log(self, name: str) -> Path:
        return self.base / f"{name}.log"

    def logs(self) -> dict[str, str]:
        return {path.stem: path.read_text()[-3000:] for path in sorted(self.base.glob("n?.log"))}

    def wait_for(self, what: Callable[[], bool], seconds: float = 120) -> None:
        deadline = time.monotonic() + seconds
        while not what():
            assert time.monotonic() < deadline, self.logs()
            time.sleep(0.02)

    def done(self) -> int:
        return len(self.run.read_metrics())

    def reach(self, step: int) -> None:
        self.wait_for(lambda: self.done() >= step)

    def kill(self, name: str) -> None:
        """The whole node: its supervisor, and with it what it has started."""
        self.processes[name].send_signal(signal.SIGKILL)

    def workers(self, name: str) -> list[psutil.Process]:
        """The processes that train on a node, by rank."""
        server = next(
            c for c in psutil.Process(self.processes[name].pid).children() if len(c.children()) >= self.devices
        )
        return sorted(server.children(), key=lambda child: child.pid)

    def leader(self) -> str:
        """The node that has rank 0."""
        nodes: dict[str, list[int]] = self.events("group")[-1]["nodes"]
        return next(name for name, (first, _) in nodes.items() if first == 0)

    def events(self, name: str) -> list[dict[str, Any]]:
        return [event for event in self.run.read_events() if event["event"] == name]

    def finish(self, *names: str, code: int = 0, seconds: float = 150) -> None:
        """All nodes end, with this exit code."""
        deadline = time.monotonic() + seconds
        for name in names or self.processes:
            left = max(0.1, deadline - time.monotonic())
            try:
                assert self.processes[name].wait(left) == code, self.logs()
            except subprocess.TimeoutExpired:
                raise AssertionError(self.logs()) from None

    def end(self) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()
                process.wait()


def assert_alike(ran: RunFolder, whole: RunFolder, *, tolerance: float = 0.0) -> None:
    """The same losses, weights and samples: to the bit where the layout never changed."""
    lines = [folder.read_metrics() for folder in (ran, whole)]
    assert [(line["step"], line["samples"]) for line in lines[0]] == [(x["step"], x["samples"]) for x in lines[1]]
    assert [line["step"] for line in lines[0]] == list(range(1, STEPS + 1))
    for one, other in zip(*lines, strict=True):
        assert abs(one["loss"] - other["loss"]) <= tolerance * abs(other["loss"]), one["step"]
    states = [Store(folder.checkpoints).load(STEPS) for folder in (ran, whole)]
    assert states[0].tensors.keys() == states[1].tensors.keys()
    for name, tensor in states[0].tensors.items():
        other = states[1].tensors[name]
        assert torch.equal(tensor, other) if not tolerance else torch.allclose(tensor, other, rtol=tolerance), name
