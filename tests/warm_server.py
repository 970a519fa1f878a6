"""The process that `warm_process` forks Python programs from: it has imported what they need.

Run as ``python warm_server.py SOCKET``, where SOCKET is the number of an inherited socket. It ends, with the
programs that still run, when the other end of the socket is closed.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import io
import json
import logging
import os
import runpy
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import pairwise
from multiprocessing import forkserver, resource_tracker, util
from pathlib import Path
from types import ModuleType
from typing import Any

import warm_process
from warm_process import NUMBER

LARGEST_REQUEST = 2**20  # bytes: words and environment
# A run's own fork server imports the first; that has side effects, and stays to be imported there.
IMPORTED_BY_RUNS = "stoker.launch.forkserver_preload"
IMPORTED = [
    "stoker.cli.main",
    "stoker.cli.commands.train",
    "stoker.cli.commands.node",
    "stoker.cli.commands.plan",
    "stoker.cli.train.stages",
    "stoker.launch.supervisor",
    "stoker.train.ranking.export_ranking",
    "transformers.models.llama.modeling_llama",
]


def serve(tests: socket.socket) -> None:
    """Forks a program for each request; writes its process id, then its exit status, into the request's pipe.

    Requests come from ``tests`` and from the programs themselves.
    """
    woken, wake = os.pipe()
    os.set_blocking(woken, False)
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    sockets = [tests]
    running: dict[int, int] = {}  # the pipe of each process
    while True:
        ready, _, _ = select.select([woken, *sockets], [], [])
        if woken in ready:
            os.read(woken, 4096)
            _report_ended(running)
        for requests in (found for found in sockets if found in ready):
            text, files, _, _ = socket.recv_fds(requests, LARGEST_REQUEST, 4)
            if not text:
                sockets.remove(requests)
                requests.close()
                break
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            process = os.fork()
            if not process:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background ignores it
                os._exit(ran(json.loads(text), files[:3], theirs))
            theirs.close()
            sockets.append(ours)
            running[process] = files[3]
            _tell(files[3], process)
            for file in files[:3]:
                os.close(file)
            break  # the list has changed
        if tests not in sockets:
            for process in running:
                os.kill(process, signal.SIGKILL)
            return


def _report_ended(running: dict[int, int]) -> None:
    for process in list(running):
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            pipe = running.pop(process)
            _tell(pipe, status)
            os.close(pipe)


def _tell(pipe: int, number: int) -> None:
    with suppress(BrokenPipeError):  # whoever asked has ended
        os.write(pipe, number.to_bytes(NUMBER, "little"))


def ran(request: dict[str, Any], files: Sequence[int], requests: socket.socket) -> int:
    """The exit code of a program that this process becomes; all is done that an interpreter does at its end."""
    code = 0
    try:
        become(request, files, requests)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        if not isinstance(end.code, int | None):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def become(request: dict[str, Any], files: Sequence[int], requests: socket.socket) -> None:
    """Makes this process the program that is asked for, and runs it."""
    os.setsid()
    for to, file in enumerate(files):
        os.dup2(file, to)
    close_others([requests.fileno()])
    warm_process.servers.append(warm_process.WarmServer(requests))
    warm_process.start_warm()
    sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)))
    sys.stdout, sys.stderr = output(1, "strict"), output(2, "backslashreplace")
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.path[1:1] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    importlib.invalidate_caches()
    util.spawnv_passfds = fork_server_from(util.spawnv_passfds)
    option, program, *words = request["words"]
    sys.path[0] = request["folder"] if option == "-m" else ""
    if option == "-m":
        sys.argv = [program, *words]
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        if "PYTHONSAFEPATH" in os.environ:
            del sys.path[0]
        sys.argv = ["-c", *words]
        main = sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(program, "<string>", "exec"), main.__dict__)


def close_others(files: Sequence[int]) -> None:
    """Closes all files but these and the standard ones."""
    for first, last in pairwise([2, *sorted(files), os.sysconf("SC_OPEN_MAX")]):
        os.closerange(first + 1, last)


def threads() -> int:
    """Threads of this process, those of libraries among them."""
    return len(list(Path("/proc/self/task").iterdir()))


def output(file: int, errors: str) -> io.TextIOWrapper:
    """A stream such as the interpreter makes of a file."""
    lines = file == 2 or os.isatty(file)
    return io.TextIOWrapper(open(file, "wb", closefd=False), errors=errors, line_buffering=lines)


def fork_server_from(spawn: Callable[..., int]) -> Callable[..., int]:
    """Starts a run's fork server as a fork of the run's supervisor, and other processes with ``spawn``."""

    def start(path: str, words: Sequence[str], files: Sequence[int]) -> int:
        program = words[-1]
        if "multiprocessing.forkserver" not in program or threads() > 1:  # those would not be in the fork
            return spawn(path, words, files)
        sys.stdout.flush()
        process = os.fork()
        if process:
            return process
        try:
            close_others(files)
            warm_process.start_plain()
            forkserver._forkserver.__init__()  # type: ignore[misc]  # the fork happened in the middle of a call of it
            resource_tracker._resource_tracker._fd = None
            util.spawnv_passfds = spawn
            exec(program, {})
        except SystemExit:
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        raise AssertionError("a fork server ends by exiting")

    return start


def main() -> None:
    """Imports, then serves until the socket ends."""
    from stoker.launch.forkserver import FOR_LANGUAGE, PRELOADED

    logging.disable(logging.WARNING)  # what libraries say when they are imported
    for name in [*PRELOADED, *FOR_LANGUAGE, *IMPORTED]:
        if name != IMPORTED_BY_RUNS:
            importlib.import_module(name)
    logging.disable(logging.NOTSET)
    assert threads() == 1, "a library started threads, which would not be in the forks"
    gc.collect()
    gc.freeze()
    serve(socket.socket(fileno=int(sys.argv[1])))


if __name__ == "__main__":
    os.setsid()
    main()
