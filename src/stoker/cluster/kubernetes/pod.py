"""The first process of a pod: it waits for the other pods' names, runs `stoker node`, and prints its ranks' logs.

``python -m stoker.cluster.kubernetes.pod LOGS [LOGS ...] node JOB --rendezvous HOST:PORT,... ...``

A pod's name resolves only once the pod has an address, and a supervisor needs the addresses. Each process writes its
log to a file of the run's folder; a cluster keeps the container's output, so this prints the log files of the pod's
ranks, with ``rank N | `` before each line, and the stage's name before that.
"""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

POLL = 0.5  # seconds between two looks at the logs, and between two questions for a name
NAMES_WAIT = 600.0  # seconds until a supervisor starts without the names that have no address yet
_RANKS = re.compile(r"node \S+: rank (\d+) to (\d+) of \d+")


def main(words: list[str]) -> int:
    """Runs to the supervisor's end; its exit code."""
    start = words.index("node")
    logs, node = words[:start], words[start:]
    with subprocess.Popen([sys.executable, "-m", "stoker", *with_addresses(node)], stdout=subprocess.PIPE) as process:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda got, _: process.send_signal(got))
        ranks = RankLogs([Path(folder) for folder in logs])
        over = threading.Event()
        printing = threading.Thread(target=ranks.follow, args=(over,))
        printing.start()
        assert process.stdout is not None
        for line in iter(process.stdout.readline, b""):
            _print(line)
            if found := _RANKS.search(line.decode(errors="replace")):
                ranks.choose(range(int(found[1]), int(found[2]) + 1))
        code = process.wait()
        over.set()
        printing.join()
    return 128 - code if code < 0 else code


def with_addresses(words: list[str]) -> list[str]:
    """Replaces names in ``--rendezvous`` by addresses, once all names resolve; after `NAMES_WAIT` seconds the names
    without an address are left out.
    """
    at = words.index("--rendezvous") + 1
    places = [place.rpartition(":") for place in words[at].split(",")]
    until = time.monotonic() + NAMES_WAIT
    addresses: dict[str, str] = {}
    while len(addresses) < len(places):
        for host, _, _ in places:
            if host not in addresses and (address := _address(host)) is not None:
                addresses[host] = address
        if time.monotonic() > until:
            missing = ", ".join(host for host, _, _ in places if host not in addresses)
            print(f"no address within {NAMES_WAIT:g} s: {missing}", flush=True)
            break
        if len(addresses) < len(places):
            time.sleep(POLL)
    known = [f"{addresses[host]}:{port}" for host, _, port in places if host in addresses]
    return [*words[:at], ",".join(known), *words[at + 1 :]]


def _address(host: str) -> str | None:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return None
    return str(min(found, key=lambda entry: entry[0] != socket.AF_INET)[4][0])


class RankLogs:
    """Prints new lines of this pod's rank logs.

    Args:
        folders: of the logs, which all pods may share; for a job with stages, one of each stage's run.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self._labels = {folder: f"{folder.parent.name} " if len(folders) > 1 else "" for folder in folders}
        self._offsets: dict[tuple[Path, int], int] = {}
        self._lock = threading.Lock()

    def choose(self, ranks: range) -> None:
        """Sets the ranks of this pod from now on; lines that other pods wrote to their logs before are not printed."""
        self.look()
        with self._lock:
            chosen = [(folder, rank) for folder in self._labels for rank in ranks]
            self._offsets = {log: self._offsets.get(log, _size(*log)) for log in chosen}

    def follow(self, over: threading.Event) -> None:
        """Prints new lines until the event is set."""
        while not over.wait(POLL):
            self.look()
        self.look(last=True)

    def look(self, *, last: bool = False) -> None:
        """Prints the lines that are new; an unfinished one only at the last look."""
        with self._lock:
            for (folder, rank), offset in self._offsets.items():
                label = f"{self._labels[folder]}rank {rank}"
                try:
                    with (folder / f"rank-{rank}.log").open("rb") as file:
                        self._offsets[folder, rank] = offset + _new(file, offset, label, last=last)
                except OSError:
                    continue


def _size(folder: Path, rank: int) -> int:
    try:
        return (folder / f"rank-{rank}.log").stat().st_size
    except OSError:
        return 0


def _new(file: IO[bytes], offset: int, label: str, *, last: bool) -> int:
    """Prints the lines behind an offset; how many bytes they have."""
    file.seek(offset)
    content = file.read()
    if not last:
        content = content[: content.rfind(b"\n") + 1]
    for line in content.splitlines():
        _print(b"%s | %s\n" % (label.encode(), line.rpartition(b"\r")[2]))
    return len(content)


def _print(line: bytes) -> None:
    sys.stdout.buffer.write(line)
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
