"""The lab of `lab.sh`: three hosts on this machine, and jobs that are submitted to them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from made_module import made_module
from tiny_llama import save_tiny_llama
from tiny_tokenizer import tiny_tokenizer

SCRIPT = Path(__file__).with_name("lab.sh")
NEEDED = ("sshd", "slurmctld", "slurmd", "munged", "ip", "setsid")  # what `.ci/run` installs
PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"
ROWS = 48
PAUSE = 0.04  # seconds that a sample takes to come, where the job is not the one to compare with
LONG = {
    "task": "module", "steps": 240, "train": {"batch": 4, "precision": "fp64"}, "parallel": {"data": 2},
    "module": {"model": "made:network", "loss": "torch.nn.functional:mse_loss", "data": "made:data"},
    "checkpoint": {"every": 60, "best": False},
}  # fmt: skip


def missing() -> str:
    """What this machine lacks for the lab; empty where it has all."""
    lacking = [name for name in NEEDED if shutil.which(name, path=PATH) is None]
    if os.geteuid() != 0:
        return "three hosts on one machine need root"
    return f"there is no {', '.join(lacking)}: see .ci/run" if lacking else ""


@dataclass
class Lab:
    """Three hosts, h1 to h3.

    Attributes:
        folder: of their configurations; what is in ``own`` differs between hosts that are namespaces.
        base: where jobs are submitted from.
    """

    folder: Path
    base: Path
    environment: dict[str, str] = field(default_factory=dict)

    def do(self, *words: str) -> None:
        """Calls `lab.sh`."""
        done = subprocess.run(
            [SCRIPT, words[0], self.folder, *words[1:]],
            env={**os.environ, "PATH": PATH},
            capture_output=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr.decode() + done.stdout.decode()

    @property
    def kind(self) -> str:
        """``namespaces``, or ``loopback`` where those are not allowed."""
        return (self.folder / "kind").read_text().strip()

    def address(self, number: int) -> str:
        """The address of a host."""
        lines = (self.folder / "hosts").read_text().splitlines()
        return next(line.split()[0] for line in lines if line.endswith(f" h{number}"))

    @property
    def port(self) -> str:
        """Of the hosts' sshd."""
        return "22" if self.kind == "namespaces" else "2222"

    @property
    def python(self) -> str:
        """The Python of Slurm's nodes. Where all of their addresses are those of one host, it is told which to take."""
        if self.kind == "namespaces":
            return sys.executable
        wrapper = self.folder / "python"
        wrapper.write_text(f'#!/bin/sh\nexec {sys.executable} "$@" --listen "$SLURMD_NODENAME"\n')
        wrapper.chmod(0o755)
        return str(wrapper)

    def prepare(self, **values: Any) -> None:
        """Writes the job, its model and its data; ``long.yaml`` lasts so long that it can be stopped on its way."""
        save_tiny_llama(self.base / "tiny", tiny_tokenizer())
        rows = [{"instruction": f"say {i}", "output": f"{i} and {i + 1}"} for i in range(ROWS)]
        (self.base / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        job = {
            "task": "sft", "model": "tiny", "data": "rows.jsonl", "steps": 6, "evaluate": {"fraction": 0},
            "train": {"batch": 4, "precision": "fp64", "lr": 0.01, "seq_len": 64}, "checkpoint": {"every": 3},
            "parallel": {"data": 2}, **values,
        }  # fmt: skip
        (self.base / "job.yaml").write_text(json.dumps(job))
        (self.base / "made.py").write_text(made_module())
        (self.base / "long.yaml").write_text(json.dumps(LONG))

    def stoker(self, *words: object, code: int = 0, timeout: float = 400) -> str:
        """What `stoker` prints; its errors, where it is to end with another code."""
        environment = {
            **os.environ,
            "PATH": PATH,
            "OMP_NUM_THREADS": "1",  # so that sums have one order everywhere
            "PYTHONPATH": f"{self.base}:{os.environ.get('PYTHONPATH', '')}",  # the long job's module
            "XDG_STATE_HOME": str(self.base / "state"),
            "XDG_CONFIG_HOME": str(self.base / "config"),
            "SLURM_CONF": str(self.folder / "slurm.conf"),
            **self.environment,
        }
        command = [sys.executable, "-m", "stoker", *map(str, words)]
        done = subprocess.run(
            command, cwd=self.base, env=environment, capture_output=True, text=True, timeout=timeout, check=False
        )
        assert done.returncode == code, f"{words}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout if code == 0 else done.stderr

    def target(self, name: str, **block: Any) -> None:
        """Names a target in the user's configuration."""
        file = self.base / "config/stoker/targets.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        known = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps({**known, name: block}))

    def status(self, run: str) -> dict[str, Any]:
        """The state of a submitted run, as `stoker describe` has it."""
        found: dict[str, Any] = json.loads(self.stoker("describe", run, "--json"))
        return found

    def until(self, true: Callable[[], bool], seconds: float = 240) -> None:
        """Waits until something holds."""
        end = time.monotonic() + seconds
        while not true():
            assert time.monotonic() < end
            time.sleep(0.3)


def losses(run: Path) -> list[float]:
    """The loss of every step, as it was written."""
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]
