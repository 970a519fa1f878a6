"""Python programs in processes of their own that need not import torch and transformers first.

Each import costs seconds of processor time, so that most of the time of a test that starts `stoker train` would go
into them. The processes here are forks of one that has imported (`warm_server`); so are the fork servers that runs
start. That `stoker` works in an interpreter of its own is proven by the tests that do not use this: of the wheel, of
hosts, of launchers.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

SERVER = Path(__file__).with_name("warm_server.py")
PROGRAMS = (
    "stoker",
    "stoker.page.processes.detached_process",
    "stoker.page.processes.job_queue",
    "stoker.page.processes.end_with_parent",
)
NUMBER = 8  # bytes of a number that the server writes


@contextmanager
def warm_processes() -> Iterator[None]:
    """Has the package `subprocess` start ``python -m stoker`` and ``python -c CODE`` as forks of a warm server."""
    start_warm()
    try:
        yield
    finally:
        start_plain()


def start_warm() -> None:
    """As in `warm_processes`, from now on."""
    subprocess.Popen, os.waitpid = WarmProcess, _waitpid  # type: ignore[misc]


def start_plain() -> None:
    """From now on processes start as ever."""
    subprocess.Popen, os.waitpid = _plain_process, _plain_waitpid  # type: ignore[misc]


_plain_process, _plain_waitpid = subprocess.Popen, os.waitpid
_forks: dict[int, int] = {}  # the pipe of each, by process id


class WarmProcess(subprocess.Popen[Any]):
    """A process that is a fork of the server where it runs `stoker` or given code, any other process otherwise.

    A fork is always in a session of its own.
    """

    def _execute_child(  # type: ignore[no-untyped-def]
        self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell,
        p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, *more,
    ) -> None:  # fmt: skip
        words = _words(args)
        if words is None or shell or pass_fds:
            return super()._execute_child(  # type: ignore[misc]
                args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell,
                p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, *more,
            )  # fmt: skip
        folder = os.fspath(cwd or Path.cwd())
        request = {"words": words, "folder": folder, "environment": dict(os.environ if env is None else env)}
        files = [given if given != -1 else own for own, given in enumerate((p2cread, c2pwrite, errwrite))]
        pipe, written = os.pipe()  # from the server: the fork's process id, then its exit status
        try:
            _server().ask(request, [*files, written])
        finally:
            os.close(written)
            self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]
        self.pid = _number(pipe)
        _forks[self.pid] = pipe
        self._child_created = True

    def _internal_poll(self, *given: Any, **named: Any) -> int | None:
        if self.pid not in _forks:
            return super()._internal_poll(*given, **named)  # type: ignore[no-any-return, misc]
        with suppress(subprocess.TimeoutExpired):  # unlike a poll, it calls `os.waitpid` by that name
            self.wait(0)
        return self.returncode


def _waitpid(process: int, flags: int) -> tuple[int, int]:
    """``os.waitpid``, also of forks: their status comes from the server, whose children they are."""
    pipe = _forks.get(process)
    if pipe is None:
        return _plain_waitpid(process, flags)
    os.set_blocking(pipe, not flags & os.WNOHANG)
    try:
        status = _number(pipe)
    except BlockingIOError:
        return 0, 0
    os.close(_forks.pop(process))
    return process, status


def _number(pipe: int) -> int:
    number = os.read(pipe, NUMBER)
    assert number, "the server has ended"
    return int.from_bytes(number, "little")


def _words(command: Any) -> list[str] | None:
    """What follows the interpreter and its option ``-P``; None where the command is not a program for the server."""
    if isinstance(command, str | bytes | os.PathLike) or os.fspath(command[0]) != sys.executable:
        return None
    words = [os.fspath(word) for word in command[1:]]
    if words[0] == "-P":
        words = words[1:]
        return words if words[:2] == ["-m", "stoker"] else None
    return words if words[0] == "-c" or (words[0] == "-m" and words[1] in PROGRAMS) else None


class WarmServer:
    """The server of this process, which ends with it: a new one, or the one that this process was forked from."""

    def __init__(self, known: socket.socket | None = None) -> None:
        self._lock = threading.Lock()
        if known is not None:
            self._socket = known
            return
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, str(SERVER), str(theirs.fileno())]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # as most tests ask for; torch reads it once
            environment["JE_ARROW_MALLOC_CONF"] = "background_thread:false"  # pyarrow starts a thread in some builds
            environment.pop("PYTHONSAFEPATH", None)  # the server finds this file beside its own
            self._process = _plain_process(command, pass_fds=[theirs.fileno()], env=environment)

    def ask(self, request: dict[str, Any], files: list[int]) -> None:
        """Has a program started; the last file is the pipe that says what becomes of it."""
        with self._lock:
            socket.send_fds(self._socket, [json.dumps(request).encode()], files)


servers: list[WarmServer] = []  # one, once it is needed


def _server() -> WarmServer:
    if not servers:
        servers.append(WarmServer())
    return servers[0]
