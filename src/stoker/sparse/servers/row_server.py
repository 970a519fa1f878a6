"""A parameter server: a process that stores the rows of some ids for the training processes."""

from __future__ import annotations

import json
import shutil
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
from filelock import FileLock, Timeout

from stoker import sockets
from stoker.errors import Problem, RunFailed, UserError, reason_of, typed_reason
from stoker.files import replace_file
from stoker.frames import PeerRefused
from stoker.sparse.eviction_pass import EvictionPlan
from stoker.sparse.servers.served_shard import Commit, ServedShard
from stoker.sparse.servers.server_connection import Address, Message, ServerConnection
from stoker.sparse.servers.wire_format import arrays_of, rows_of, settings_of
from stoker.sparse.sparse_state import SparseState, TableState
from stoker.sparse.table_settings import TableSettings

_BACKLOG = 128
_AGAIN = 0.1  # seconds until connections are accepted again after an error
_QUIET = 60.0  # seconds between two lines about refused connections
_REMEMBERED = 1000  # maximum number of remembered runs whose rows were dropped
_STRANGERS = 64  # maximum of unauthenticated connections; a further one ends the oldest
_LOCK, _RUN = "table-server.lock", "run.json"  # beside the folders of rows
_ROWS = ("layout-*", "rows")


class RowServer:
    """Serves one run at a time. A new run replaces the previous one, whose rows are dropped.

    Trainers of a run whose rows were dropped get an error.

    Args:
        listen: address; port 0 takes a free one.
        secret: shared with trainers, which authenticate with it.
        folder: of no other server: snapshots, logs, and rows that do not fit in memory. Its content is restored, so
            that a killed server continues where it ended.
        snapshot_every: steps between snapshots, which bound the size of the log and the time of a restart.

    Attributes:
        address: the bound address.

    Raises:
        OSError: the address cannot be bound.
        UserError: the folder has foreign files with the names of its own, or another server, cannot be written, or its
            log does not fit its snapshot.
    """

    def __init__(self, listen: Address, secret: bytes, folder: Path, *, snapshot_every: int = 1000) -> None:
        self._secret, self._folder, self._every = secret, folder, snapshot_every
        self._listening = sockets.listen(listen, backlog=_BACKLOG)
        self.address: Address = self._listening.getsockname()[:2]
        self._lock = threading.Lock()
        self._is_closed = False
        self._run: Message = {}
        self._shards: list[ServedShard] = []
        self._dropped: list[str] = []  # names of runs whose rows were dropped
        self._connected: set[socket.socket] = set()
        self._strangers: dict[socket.socket, None] = {}  # the oldest first
        self._quiet_until = 0.0  # by the monotonic clock
        self._taken = _take(folder)
        if (folder / _RUN).exists():
            run = json.loads((folder / _RUN).read_text())
            self._dropped = run.pop("dropped", [])
            self._shards, self._run = self._made(run) if run else [], run

    def serve(self) -> None:
        """Answers trainers until `close`."""
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                if self._is_closed:
                    return
                time.sleep(_AGAIN)  # too many files are open, or the trainer's network failed
                continue
            for oldest in list(self._strangers)[: max(0, len(self._strangers) - _STRANGERS + 1)]:
                self._strangers.pop(oldest, None)
                with suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)
            self._strangers[connection] = None
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def close(self) -> None:
        """Stops serving; files on disk are kept."""
        self._is_closed = True
        sockets.close_connection(self._listening)
        for connected in [*self._connected]:
            with suppress(OSError):
                connected.shutdown(socket.SHUT_RDWR)
        for shard in self._shards:
            shard.close(forget=False)
        self._taken.release()

    # -- one trainer --------------------------------------------------------------------------------------------------

    def _serve(self, connected: socket.socket) -> None:
        self._connected.add(connected)
        try:
            try:
                connection = ServerConnection(connected, self._secret, dialled=False)
            except PeerRefused:
                self._report_refused(connected)
                raise
            self._strangers.pop(connected, None)
            try:
                self._converse(connection)
            except (UserError, ValueError) as error:
                connection.send({"error": str(error)})
            except (ConnectionError, TimeoutError, PeerRefused):
                raise  # the trainer has gone
            except Exception as error:
                connection.send({"error": typed_reason(error)})
                if not isinstance(error, OSError):
                    traceback.print_exc()
        except (OSError, PeerRefused):
            pass
        finally:
            self._strangers.pop(connected, None)
            self._connected.discard(connected)
            connected.close()

    def _report_refused(self, connected: socket.socket) -> None:
        """Prints who was refused, at most once in ``_QUIET`` seconds."""
        if time.monotonic() >= self._quiet_until:
            self._quiet_until = time.monotonic() + _QUIET
            print(f"{connected.getpeername()[0]} was refused: its secret differs", file=sys.stderr, flush=True)

    def _converse(self, connection: ServerConnection) -> None:
        hello, _ = connection.receive()
        shards, trainer = self._begin(hello["run"], returns=hello.get("returns", False)), int(hello["trainer"])
        connection.send({"steps": [shard.decided() for shard in shards]})
        while True:
            message, arrays = connection.receive()
            _answer(connection, shards[message["layout"]], trainer, message, arrays)

    def _begin(self, run: Message, *, returns: bool) -> list[ServedShard]:
        """Starts a run, or continues the current one.

        Args:
            returns: whether the trainer was connected before.

        Raises:
            RunFailed: the server no longer has the rows of this run.
        """
        with self._lock:
            if run == self._run:
                return self._shards
            if returns or run["name"] in self._dropped:
                raise RunFailed("it no longer has this run's rows: another run has begun there, or its folder was lost")
            for shard in self._shards:
                shard.close(forget=True)
            if self._run:
                self._dropped = [*self._dropped, self._run["name"]][-_REMEMBERED:]
                self._run, self._shards = {}, []
                replace_file(self._folder / _RUN, json.dumps({"dropped": self._dropped}))
                for folder in (folder for name in _ROWS for folder in self._folder.glob(name)):
                    shutil.rmtree(folder)
            shards = self._made(run)
            replace_file(self._folder / _RUN, json.dumps({**run, "dropped": self._dropped}))
            self._shards, self._run = shards, run
            return shards

    def _made(self, run: Message) -> list[ServedShard]:
        return [
            ServedShard(
                [self._settings(table) for table in tables],
                self._folder / f"layout-{number}",
                seed=run["seed"],
                number=run["number"],
                servers=run["servers"],
                trainers=run["trainers"],
                snapshot_every=self._every,
            )
            for number, tables in enumerate(run["layouts"])
        ]

    def _settings(self, table: Message) -> TableSettings:
        settings = settings_of(table)
        return replace(settings, disk=settings.disk and replace(settings.disk, folder=self._folder / "rows"))


def _is_of_server(path: Path) -> bool:
    """Returns whether a file is the `_RUN` of a server."""
    try:
        run = json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return False
    return isinstance(run, dict) and ("layouts" in run or "dropped" in run)


def _take(folder: Path) -> FileLock:
    """Creates and locks a server's folder.

    Raises:
        UserError: it has foreign files with a server's names, another server uses it, or it cannot be written.
    """
    advice = "give another --folder, for this server alone"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        found = [path.name for name in (_RUN, *_ROWS) for path in folder.glob(name)]
        if found and not (folder / _LOCK).exists() and not _is_of_server(folder / _RUN):
            raise UserError(Problem(f"{folder} has {found[0]}, and is not the folder of a table server", advice))
        taken = FileLock(folder / _LOCK, timeout=0, thread_local=False)
        taken.acquire()
    except Timeout as error:
        raise UserError(Problem(f"another table server uses {folder}", advice)) from error
    except OSError as error:
        raise UserError(Problem(f"rows cannot be kept in {folder}: {reason_of(error)}")) from error
    return taken


def _answer(
    connection: ServerConnection, shard: ServedShard, trainer: int, message: Message, arrays: list[np.ndarray]
) -> None:
    """Carries out a trainer's message and sends its answer; push, commit and prefetch have none."""
    match message["kind"]:
        case "push":
            shard.push(trainer, message["step"], arrays)
        case "commit":
            plan = EvictionPlan(*arrays) if arrays else None
            shard.commit(trainer, message["step"], Commit(message["scale"], message["lr_factor"], plan))
        case "prefetch":
            shard.prefetch(*arrays)
        case "values":
            values = shard.values(*arrays, least=message["least"], training=message["training"])
            connection.send({"step": shard.step, "waits": shard.shard.waits}, [values.numpy()])
        case "candidates":
            found = shard.candidates(message["what"], arrays, message["least"])
            connection.send({"step": shard.step}, [found])
        case "evicted":
            connection.send({"step": shard.step}, [shard.evicted(message["least"])])
        case "state":
            parts = shard.state(message["since"], message["rows"], message["least"], message["is_base"])
            _send_parts(connection, parts)
        case "rebase":
            shard.rebase(message["base"], message["by"], message["least"])
            connection.send({})
        case "load":
            shard.load(SparseState(message["step"], None, {message["name"]: rows_of(arrays)}))
            connection.send({})
        case "snapshot":
            shard.snapshot()
            connection.send({})
        case "counts":
            connection.send({"counts": shard.counts()})
        case kind:
            raise ValueError(f"there is no request {kind!r}")


def _send_parts(connection: ServerConnection, parts: Iterable[tuple[str, TableState]]) -> None:
    for name, rows in parts:
        connection.send({"name": name}, arrays_of(rows))
    connection.send({"name": None})
