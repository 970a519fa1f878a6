"""Several nodes on one machine: a supervisor on each of the addresses 127.0.0.2, 127.0.0.3 and so on."""

from __future__ import annotations

import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from stoker.errors import CannotRun, Problem

AWAY = 1.0  # seconds until a killed node is restarted, as a cluster would do
POLL = 0.05  # seconds


def address_of(number: int) -> str:
    """Returns the address of a node, counted from 0."""
    return f"127.0.0.{2 + number}"


@dataclass
class _Node:
    number: int
    command: list[str]
    process: subprocess.Popen[str] | None = None
    died: float = 0.0


def train_on_loopback(words: Sequence[str], *, count: int, base: Path) -> tuple[int, str]:
    """Trains a job on ``count`` nodes; a killed node is restarted.

    Args:
        words: the job and its overrides, as on the command line.
        base: working folder of the nodes.

    Returns:
        The exit code of largest magnitude, and the last error line of a node with it.

    Raises:
        CannotRun: this system has no such addresses.
    """
    try:
        with socket.create_server((address_of(0), 0)) as free:
            port = free.getsockname()[1]
    except OSError as error:
        raise CannotRun(
            Problem(
                f"{address_of(0)} cannot be listened on ({error.strerror}): nodes are rehearsed on addresses of the "
                "loopback interface, as Linux has them"
            )
        ) from error
    with TemporaryDirectory(prefix="stoker-nodes-") as folder:
        secret = Path(folder) / "secret"
        secret.touch(mode=0o600)
        secret.write_text(secrets.token_hex(32))
        rendezvous = ",".join(f"{address_of(number)}:{port}" for number in range(count))
        common = [sys.executable, "-P", "-m", "stoker", "node", *words, "--rendezvous", rendezvous]
        nodes = [
            _Node(number, [*common, "--secret", str(secret), "--name", str(number), "--listen", address_of(number)])
            for number in range(count)
        ]
        try:
            return _run(nodes, base, Path(folder))
        finally:
            for node in nodes:
                if node.process is not None and node.process.poll() is None:
                    node.process.kill()
                    node.process.wait()


def _run(nodes: Sequence[_Node], base: Path, folder: Path) -> tuple[int, str]:
    codes: dict[int, int] = {}
    for node in nodes:
        _start(node, base, folder)
    while len(codes) < len(nodes):
        for node in nodes:
            if node.number in codes:
                continue
            if node.process is None:
                if time.monotonic() - node.died >= AWAY:
                    _start(node, base, folder)
                continue
            code = node.process.poll()
            if code == -signal.SIGKILL and not any(code for code in codes.values()):
                node.process, node.died = None, time.monotonic()
            elif code is not None:
                codes[node.number] = code
        time.sleep(POLL)
    worst = max(codes, key=lambda number: abs(codes[number]))
    lines = [line for line in (folder / f"{worst}.err").read_text().splitlines() if line.strip()]
    return codes[worst], lines[-1] if lines else f"exit code {codes[worst]}"


def _start(node: _Node, base: Path, folder: Path) -> None:
    with (folder / f"{node.number}.out").open("a") as out, (folder / f"{node.number}.err").open("a") as err:
        node.process = subprocess.Popen(
            node.command, cwd=base, stdin=subprocess.DEVNULL, stdout=out, stderr=err, text=True, start_new_session=True
        )
