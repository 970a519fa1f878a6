"""The actor that runs one node's supervisor, and reads the logs on that node."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from stoker.cluster.log_files import LogFile, LogPlace, new_lines, run_logs
from stoker.cluster.ray.shown_logs import Key, NodeLines
from stoker.cluster.shell import LocalShell
from stoker.hardware.process.parent_process import die_with_parent


class SupervisorActor:
    """One node of the job; Ray runs it in its bundle of the placement group.

    Args:
        folder: the base of the run's relative paths, on storage that all nodes share.
    """

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder).expanduser()
        self._process: subprocess.Popen[bytes] | None = None
        self._private = Path(tempfile.mkdtemp(prefix="stoker-node-"))  # private to this user

    def address(self) -> tuple[str, str, int]:
        """(name of the host, its address, a free port)."""
        import ray

        with socket.socket() as free:
            free.bind(("", 0))
            port = int(free.getsockname()[1])
        return socket.gethostname(), ray.util.get_node_ip_address(), port

    def run(self, words: Sequence[str], secret: str, name: str) -> int:
        """Runs `stoker node` to its end; returns its exit code.

        Args:
            words: the options of ``stoker node``, with ``SECRET`` for the secret's file and ``FOLDER`` for the
                folder of runs.
        """
        if self._process is not None and self._process.poll() is None:  # it still runs: only Ray's connection was lost
            return self._process.wait()
        file = self._private / "secret"
        file.touch(mode=0o600)
        file.write_text(secret)
        self._folder.mkdir(parents=True, exist_ok=True)
        given = [word.replace("SECRET", str(file)).replace("FOLDER", str(self._folder)) for word in words]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path.cwd()), os.environ.get("PYTHONPATH", "")])}
        with (self._private / f"{name}.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "stoker", "node", *given],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
                preexec_fn=die_with_parent,  # noqa: PLW1509 -- a system call that takes no lock
            )
            return self._process.wait()

    def stop(self, number: int = signal.SIGTERM) -> None:
        """Signals the supervisor; SIGKILL ends its whole process group."""
        if self._process is None or self._process.poll() is not None:
            return
        if number == signal.SIGKILL:
            os.killpg(self._process.pid, number)
        else:
            self._process.send_signal(number)

    def lines(self, output: str, read: Mapping[Key, LogFile]) -> NodeLines:
        """Returns the log lines that this node sees after those that have been read."""
        ranks = Path(output.replace("FOLDER", str(self._folder)))
        places = [
            LogPlace(LocalShell(), f"{shlex.quote(str(self._private))}/*.log", lambda path: Path(path).stem),
            *run_logs(LocalShell(), shlex.quote(str(ranks))),
        ]
        known = {key: replace(file) for key, file in read.items()}
        return NodeLines(list(new_lines(places, known, rank=None)), known)
