"""Entry point of a worker process: it ends with its parent, writes a log, and reports its failure.

Light to import: a supervisor, which names this function, needs no torch.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from stoker.console import Console
from stoker.files import no_link
from stoker.hardware.process.parent_process import end_with
from stoker.launch.cluster_env import RankInfo
from stoker.launch.first_failure import USER_ERRORS, Failure, failure_of
from stoker.launch.host_settings import set_quirks
from stoker.launch.nodes.addresses import interface_of
from stoker.launch.run_spec import RunSpec
from stoker.node_cache import cache_peers
from stoker.node_cache.cache_stats import HERE
from stoker.node_cache.run_start import set_run_start
from stoker.resilience.deadline import SIGNAL_EXIT
from stoker.resilience.heartbeat import Heart
from stoker.resilience.stack_dumps import record_collectives, write_collectives_when_asked, write_stacks_when_asked
from stoker.resilience.stop_signals import PAUSE, STOPS
from stoker.runs.json_lines import disk_errors
from stoker.runs.shm_folder import set_node_name, shared_folder
from stoker.train.display import KeptConsole
from stoker.train.run_result import RunResult

LONGEST = 10_000  # characters of a traceback that is sent: the supervisor reads a pipe only after its process has ended


def main(result: Connection, spec: RunSpec, rank_info: RankInfo, secret: bytes, parent: int | None) -> None:
    """Trains as one process of a run, and writes the output to a log.

    Signals come from the parent only, so those that a terminal sends to all of its processes do not arrive twice. They
    are blocked until there is a handler.

    Args:
        result: receives the run's outcome, or this process' failure if it cannot be written.
        secret: shared by the processes of the run.
        parent: id of the process that started this one; None if this process was forked from a server, which
            ends with that one.
    """
    end_with(parent or os.getppid())
    os.setsid()
    os.environ |= _as_launched(rank_info)
    set_node_name(rank_info.node)
    for number in STOPS:
        signal.signal(number, _stop)
    signal.signal(PAUSE, signal.SIG_IGN)  # until there are steps
    try:
        with disk_errors(spec.logs):
            console = _redirect_output(spec.log_of(rank_info.rank), rank_info, spec)
            write_stacks_when_asked(spec.logs, rank_info.rank)
        logging.disable(logging.NOTSET)  # the server that this process was forked from was quiet
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
        interface = interface_of(rank_info.address) if rank_info.node else ""
        _say_host(set_quirks(rank_info, interface=interface), rank_info, None if spec.quiet else console)
        from stoker.launch.process_group import bind_to, bind_to_loopback, seal_objects

        if interface:
            bind_to(interface)
        else:
            bind_to_loopback()
        seal_objects(secret)
        cache_peers.set_peers(rank_info.peers)
        set_run_start(spec.began)
        if rank_info.speaks:
            HERE.add(spec.cached)
        result.send(train(spec, rank_info=rank_info, console=console))
        return
    except KeyboardInterrupt:
        code = SIGNAL_EXIT + signal.SIGTERM
    except BaseException as error:
        _report(failure_of(error, rank_info.rank), spec, result)
        code = 1
    with suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)  # at once: the teardown of an orderly exit may wait for the other processes


def _report(failure: Failure, spec: RunSpec, result: Connection) -> None:
    """Writes this process' failure to the logs, with a traceback if it is a bug; sends it to the supervisor if the
    disk fails.
    """
    try:
        failure.write(spec.failure_of(failure.rank))
    except OSError:
        with suppress(OSError):
            result.send(replace(failure, traceback=failure.traceback[-LONGEST:]))
    with suppress(OSError):
        if failure.kind in USER_ERRORS:
            print(*failure.problems, *filter(None, [failure.traceback]), sep="\n", file=sys.stderr)
        else:
            traceback.print_exc()


def _as_launched(rank_info: RankInfo) -> dict[str, str]:
    """Returns the variables that user code and libraries read to learn which process they are in."""
    return {
        "RANK": str(rank_info.rank),
        "WORLD_SIZE": str(rank_info.world),
        "LOCAL_RANK": str(rank_info.local_rank),
        "LOCAL_WORLD_SIZE": str(rank_info.local_world),
    }


def _say_host(words: str, rank_info: RankInfo, console: Console | None) -> None:
    """Logs what was set for the host, in the first process of a node; rank 0 shows it to the user as well."""
    if not words or rank_info.local_rank:
        return
    print(f"host       {words}", flush=True)
    if console is not None:
        console.print(f"host       {words}", markup=False, highlight=False)


def train(spec: RunSpec, *, rank_info: RankInfo, console: Console | None) -> RunResult:
    """Trains with a heartbeat, after the imports that this takes."""
    from stoker.launch import worker

    return worker.train(spec, rank_info=rank_info, console=console, heart=_start_heartbeat(spec, rank_info))


def _stop(*_: Any) -> None:
    """Ends the process immediately: before the first step there is nothing to save."""
    raise KeyboardInterrupt


def _redirect_output(path: Path, rank_info: RankInfo, spec: RunSpec) -> Console | None:
    """Redirects this process' output to its log file; returns the former output for rank 0."""
    console = KeptConsole(os.dup(1)) if rank_info.rank == 0 else None
    log = no_link(str(path), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # in order with standard error
    began = time.strftime("%Y-%m-%d %H:%M:%S")
    print(
        f"-- {began} rank {rank_info.rank} of {rank_info.world}, process {os.getpid()}: {spec.layout.describe()}",
        flush=True,
    )
    return console


def _start_heartbeat(spec: RunSpec, rank_info: RankInfo) -> Heart:
    """Starts this process' heartbeat, and the flight recorder of a GPU's collectives."""
    folder = shared_folder(spec.output)
    nccl = has_nccl()
    if nccl:
        record_collectives()
        write_collectives_when_asked(folder, spec.logs, rank_info.rank)
    # A GPU's computation and waiting cannot be distinguished from outside: its own time is that of
    # reading samples, and the checks before training and after a fault test the device's rate.
    return Heart(folder, rank_info.rank, device_seconds=(lambda: 0.0) if nccl else None)


def has_nccl() -> bool:
    """Returns whether the processes communicate through NCCL."""
    import torch
    import torch.distributed as dist

    return torch.cuda.is_available() and dist.is_nccl_available()
