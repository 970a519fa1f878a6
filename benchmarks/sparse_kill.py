"""A ranking run on parameter servers, whose processes are killed at random, against the same run undisturbed.

    python benchmarks/sparse_kill.py --minutes 10

Two trainers and two servers of rows on this machine. Every minute or two one process of the disturbed run gets SIGKILL:
a server, which is started again with its folder; a trainer; or the supervisor, which is started again with the same
command. At the end losses and samples of every step, the weights and all rows are compared: they are equal to the bit,
or the command fails. Rows include their optimizer's state, counts and ages. Two of three checkpoints are increments.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import psutil
import yaml

from stoker.rehearse.run_equality import compare
from stoker.runs.run_folder import RunFolder

ROWS = 60_000
TRAINERS = 2


def write_clicks(path: Path) -> None:
    """Clicks of users on items of a long tail."""
    rng = np.random.default_rng(0)
    users, items = rng.zipf(1.3, ROWS) % 20_000, rng.zipf(1.2, ROWS) % 50_000
    clicked = rng.random(ROWS) < 0.2 + 0.5 * (items % 7 == 0)
    with path.open("w") as file:
        for n in range(ROWS):
            row = {"clicked": int(clicked[n]), "user_id": int(users[n]), "item_id": int(items[n]), "timestamp": n}
            file.write(json.dumps(row) + "\n")


class Cluster:
    """The servers and the supervisor of a run."""

    def __init__(self, base: Path, name: str, steps: int) -> None:
        self.base, self.name = base, name
        self.ports = [_free_port() for _ in range(2)]
        self.job = base / f"{name}.yaml"
        table = {"eviction": {"age": 400, "every": 50}, "admission": {"count": 2}}
        servers = {"addresses": [f"127.0.0.1:{port}" for port in self.ports], "secret": "secret"}
        job = {
            "task": "ranking",
            "data": "clicks.jsonl",
            "ranking": {"label": "clicked", "model": "deepfm", "table": table, "servers": servers},
            "steps": steps,
            "output": f"runs/{name}",
            "train": {"batch": 256, "schedule": "constant"},
            "evaluate": {"every": steps},
            "checkpoint": {"every": max(20, steps // 100), "keep": 3, "full_every": 3},
            "parallel": {"data": TRAINERS},
            "faults": {"restarts": 10_000, "back_off": 0.1, "check": False},
        }
        self.job.write_text(yaml.safe_dump(job))
        self.log = (base / f"{name}.log").open("w")
        self.servers = [self.serve(number) for number in range(2)]
        self.supervisor = self.train()

    def serve(self, number: int) -> subprocess.Popen[bytes]:
        words = ["table-server", "--listen", f"127.0.0.1:{self.ports[number]}", "--secret", "secret"]
        return self._start([*words, "--folder", f"{self.name}-rows-{number}"])

    def train(self) -> subprocess.Popen[bytes]:
        return self._start(["train", self.job.name])

    def _start(self, words: list[str]) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "stoker", *words]
        return subprocess.Popen(command, cwd=self.base, stdout=self.log, stderr=self.log)

    def trainers(self) -> list[psutil.Process]:
        """The processes that train."""
        try:
            below = psutil.Process(self.supervisor.pid).children(recursive=True)
            return [process for process in below if any("worker" in word for word in process.cmdline())]
        except psutil.Error:
            return []

    def kill(self, what: str, number: int) -> bool:
        """Kills a process and starts again what nobody else does; whether there was one."""
        if what == "trainer":
            there = self.trainers()
            if not there:
                return False
            there[number % len(there)].send_signal(signal.SIGKILL)
        elif what == "server":
            self.servers[number].kill()
            self.servers[number].wait()
            self.servers[number] = self.serve(number)
        else:
            self.supervisor.kill()
            self.supervisor.wait()
            self.supervisor = self.train()
        return True

    def run(self, disturb: random.Random | None, between: Sequence[float] = (0.0, 0.0)) -> Counter[str]:
        """Until the run has ended; what was killed how often.

        Args:
            between: seconds from one kill to the next, at least and at most.
        """
        killed: Counter[str] = Counter()
        due = time.monotonic() + (disturb.uniform(*between) if disturb else math.inf)
        while self.supervisor.poll() is None:
            time.sleep(0.1)
            if disturb and time.monotonic() >= due:
                what, number = disturb.choice(["trainer", "server", "supervisor"]), disturb.randrange(2)
                killed[what] += self.kill(what, number)
                due = time.monotonic() + disturb.uniform(*between)
        for server in self.servers:
            server.terminate()
            server.wait()
        if self.supervisor.returncode:
            raise SystemExit(f"the run ended with {self.supervisor.returncode}:\n" + _tail(self.base, self.name))
        return killed


def _tail(base: Path, name: str) -> str:
    return "\n".join((base / f"{name}.log").read_text().splitlines()[-20:])


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10, help="of the undisturbed run, about")
    parser.add_argument(
        "--between",
        type=float,
        nargs=2,
        default=(60.0, 120.0),
        help="seconds from one kill to the next; a restart takes 20",
    )
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        write_clicks(base / "clicks.jsonl")
        (base / "secret").write_text(secrets.token_hex(32))
        (base / "secret").chmod(0o600)
        Cluster(base, "short", 100).run(None)
        seconds = sorted(line["seconds"] for line in RunFolder(base / "runs/short").read_metrics())
        steps = max(100, int(given.minutes * 60 / seconds[len(seconds) // 2]))
        begin = time.perf_counter()
        Cluster(base, "calm", steps).run(None)
        calm = time.perf_counter() - begin
        killed = Cluster(base, "disturbed", steps).run(random.Random(given.seed), given.between)
        took = time.perf_counter() - begin - calm
        runs = (RunFolder(base / "runs" / name) for name in ("calm", "disturbed"))
        equal = compare(*runs, precision="fp32", same_layout=True)
        print(json.dumps({"calm s": round(calm), "disturbed s": round(took), "killed": killed, **asdict(equal)}))
    raise SystemExit(0 if equal.holds else 1)


if __name__ == "__main__":
    main()
