"""Copies of the training state on the next node, from which the state of a lost node is restored.

The copies of a node's ranks go to the next member of the group, in a ring, as soon as they are complete, over a
separate connection. A process makes its next copy only after the one before has arrived (see
`stoker.checkpoint.snapshots.Snapshots.is_safe`): so at any time there is a step that every node has, and whose copies
the next node has. If the next node cannot store them, training continues without.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from stoker.files import no_link
from stoker.frames import PeerRefused, Seal
from stoker.launch.monitor import write_event
from stoker.launch.nodes.group import Node
from stoker.launch.nodes.stream import Stream
from stoker.runs.run_folder import RunFolder
from stoker.runs.shm_folder import NEIGHBOUR, SENT, stamp_of

POLL = 0.05  # seconds between two looks for new copies
AGAIN = 0.5  # seconds until a connection is retried
TRIES = 20  # connections in a row without a copy that arrives, before the copies stay on this node only
PIECE = 4 * 2**20  # bytes of a frame
SPARE = 1.1  # times a copy's size that must be free for it
SLOTS = (0, 1)


class _Known(NamedTuple):
    """A copy that needs not be sent any more."""

    stamp: str
    step: int


class Sender:
    """Sends the copies of this node's ranks to the next node, in a thread.

    Args:
        folder: the run's in shared memory.
        source: address that the connection is made from.
        output: the run's folder.
        name: of this node.
        kept: ranks whose copies this node keeps for the previous one.
    """

    def __init__(
        self,
        folder: Path,
        ranks: Iterable[int],
        neighbour: Node,
        *,
        generation: int,
        source: str,
        secret: bytes,
        output: Path,
        name: str,
        kept: Iterable[int],
    ) -> None:
        self._folder, self._ranks, self._neighbour = folder, list(ranks), neighbour
        self._hello = {"generation": generation, "from": name}
        self._source, self._secret, self._run, self._name = source, secret, RunFolder(output), name
        self._over = threading.Event()
        self._stream: Stream | None = None
        self._known: dict[Path, _Known] = {}
        self._last: dict[int, str] = {}  # stamp of the last copy of each rank that has arrived
        self._before = {stamp_of(header) for header in folder.glob("rank-*/slot-?.json")}  # of an earlier start
        self._counts = dict.fromkeys(self._ranks, 0)  # copies of this start that have arrived
        self._held = {*self._ranks, *kept}  # ranks with copies here; empty once those of others are removed
        self._bytes, self._seconds, self._sent = 0, 0.0, set[int]()
        for rank in self._ranks:
            (folder / f"{SENT}{rank}").unlink(missing_ok=True)
        (folder / NEIGHBOUR).touch()
        self._thread = threading.Thread(target=self._run_until_closed, daemon=True, name="neighbour-copies")
        self._thread.start()

    def close(self) -> None:
        """Stops sending; processes no longer wait for it."""
        self._over.set()
        if self._stream is not None:
            self._stream.close()
        self._thread.join()

    def _run_until_closed(self) -> None:
        why, tries = "", 0
        while tries < TRIES:
            tries += 1
            try:
                address = self._neighbour.address
                with Stream.dial(address, self._secret, source=self._source, hello=self._hello) as stream:
                    self._stream = stream
                    while not self._over.is_set():
                        if self._send_new(stream):
                            tries = 0
                        self._over.wait(POLL)
            except (OSError, PeerRefused, ValueError) as error:
                why = str(error) or type(error).__name__
            if self._over.wait(AGAIN):
                break
        (self._folder / NEIGHBOUR).unlink(missing_ok=True)
        if not self._over.is_set():
            write_event(self._run, "neighbour_copies_failed", node=self._name, to=self._neighbour.name, why=why)

    def _send_new(self, stream: Stream) -> bool:
        """Sends the newest copy of each rank, unless it was the last to arrive; returns whether one has arrived.

        It may be an older one than the last: a process removes its newest copy where another had no room for its own.
        """
        arrived = False
        for rank in self._ranks:
            headers = list((self._folder / f"rank-{rank}").glob("slot-?.json"))
            stamps = {path: stamp for path in headers if (stamp := stamp_of(path))}
            known = {path: copy for path, copy in self._known.items() if stamps.get(path) == copy.stamp}
            new = {path: _Known(stamp, _step_of(path)) for path, stamp in stamps.items() if path not in known}
            if not (found := known | new):
                continue
            last = self._last.get(rank)
            newest = max(found, key=lambda path: (found[path].step, path in new, found[path].stamp == last))
            if stamps[newest] != last:
                begin = time.monotonic()
                size = self._send(stream, rank, newest, stamps[newest])
                if size is None:
                    continue
                self._last[rank] = stamps[newest]
                (self._folder / f"{SENT}{rank}").write_text(stamps[newest])
                self._note(rank, size, time.monotonic() - begin)
                self._remove_others(rank, stamps[newest])
                arrived = True
            self._known |= new
        return arrived

    def _remove_others(self, rank: int, stamp: str) -> None:
        """Removes copies of ranks that were here, or were kept here, before a node was lost.

        They may be needed until all nodes have a copy of this start. Processes make their second copy only then.
        """
        self._counts[rank] += stamp not in self._before
        if min(self._counts.values()) < 2 or not self._held:
            return
        for folder in self._folder.glob("rank-*"):
            if int(folder.name.removeprefix("rank-")) not in self._held:
                shutil.rmtree(folder, ignore_errors=True)
        self._held.clear()

    def _send(self, stream: Stream, rank: int, header: Path, stamp: str) -> int | None:
        """Sends a copy; its bytes, None if it was replaced meanwhile."""
        try:
            text = header.read_text(encoding="utf-8")
            descriptor = os.open(header.with_suffix(""), os.O_RDONLY)
        except FileNotFoundError:
            return None
        try:
            size = os.fstat(descriptor).st_size
            stream.say({"rank": rank, "slot": header.stem, "size": size, "header": text})
            if not stream.hear()["room"]:
                raise ConnectionError("it has no memory for them")
            for at in range(0, size, PIECE):
                stream.send(os.pread(descriptor, PIECE, at))
        finally:
            os.close(descriptor)
        whole = stamp_of(header) == stamp
        stream.say({"whole": whole})
        return size if stream.hear()["kept"] and whole else None

    def _note(self, rank: int, size: int, seconds: float) -> None:
        """Records the rate, once a start."""
        if rank in self._sent:
            return
        self._sent.add(rank)
        self._bytes, self._seconds = self._bytes + size, self._seconds + seconds
        if len(self._sent) == len(self._ranks):
            rate = round(self._bytes / max(self._seconds, 1e-9) / 1e6, 1)
            values = {"bytes": self._bytes, "seconds": round(self._seconds, 4), "mb_s": rate}
            write_event(self._run, "neighbour_copies", node=self._name, to=self._neighbour.name, **values)


class Keeper:
    """Stores copies of other nodes' ranks; each connection has a thread.

    Args:
        place: returns the run's folder in shared memory and the generation, None if there is none yet.
    """

    def __init__(self, place: Callable[[], tuple[Path, int] | None]) -> None:
        self._place = place
        self._streams: dict[Stream, threading.Thread] = {}

    def receive(self, connection: socket.socket, seal: Seal, rest: bytes, hello: dict[str, Any]) -> None:
        """Takes over a connection."""
        stream, place = Stream(connection, seal, rest), self._place()
        if place is None or hello.get("generation") != place[1]:  # it comes again
            stream.close()
            return
        thread = threading.Thread(target=self._keep_all, args=(stream, place[0]), daemon=True, name="kept-copies")
        self._streams[stream] = thread
        thread.start()

    def close(self) -> None:
        """Ends all connections."""
        streams, self._streams = self._streams, {}
        for stream in streams:
            stream.close()
        for thread in streams.values():
            thread.join()

    def _keep_all(self, stream: Stream, folder: Path) -> None:
        with suppress(OSError, PeerRefused, ValueError, KeyError), stream:
            while True:
                self._keep(stream, folder, stream.hear(patient=True))

    def _keep(self, stream: Stream, folder: Path, message: dict[str, Any]) -> None:
        """Receives a copy; it counts only once it is whole."""
        rank, size = int(message["rank"]), int(message["size"])
        slot = next(number for number in SLOTS if message["slot"] == f"slot-{number}")
        data = folder / f"rank-{rank}" / f"slot-{slot}"
        room = min(shutil.disk_usage(folder).free, psutil.virtual_memory().available) > SPARE * size
        stream.say({"room": room})
        if not room:
            return
        data.parent.mkdir(exist_ok=True)
        arriving = data.with_suffix(".arriving")
        try:
            with open(arriving, "wb", opener=no_link) as file:
                for at in range(0, size, PIECE):
                    piece = stream.receive()
                    if len(piece) != min(PIECE, size - at):
                        raise PeerRefused
                    file.write(piece)
            if stream.hear()["whole"]:
                header, text = data.with_suffix(".json"), str(message["header"])
                json.loads(text)
                header.unlink(missing_ok=True)
                arriving.replace(data)
                partial = data.with_suffix(".partial")
                partial.write_text(text, encoding="utf-8")
                partial.replace(header)
        finally:
            arriving.unlink(missing_ok=True)
        stream.say({"kept": True})


def _step_of(header: Path) -> int:
    """Returns the step of a copy; -1 if there is none."""
    with suppress(FileNotFoundError, ValueError):
        return int(json.loads(header.read_text(encoding="utf-8"))["step"])
    return -1
