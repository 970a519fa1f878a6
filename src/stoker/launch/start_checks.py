"""Checks of a node's devices and data before its processes start.

They take torch and the libraries of language models, which the fork server has imported for the processes: in a fork
of it they begin at once, and the node's supervisor loads neither.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from stoker.errors import Problem, RunFailed
from stoker.hardware.process.parent_process import end_with
from stoker.job.task_spec import is_language
from stoker.launch.first_failure import USER_ERRORS, Failure, failure_of, failure_of_exit
from stoker.launch.forkserver import CONTEXT, FORKS, start_server, wait_for_server
from stoker.launch.run_spec import RunSpec
from stoker.node_cache.cache_stats import HERE, CacheStats
from stoker.resilience.stop_signals import end_by
from stoker.terminal import escaped_output, show_cursor

if TYPE_CHECKING:
    from stoker.data.build_cache import Report

GRACE = 2.0  # seconds in which a check that is no longer wanted ends by itself
Reporting = Callable[[], AbstractContextManager["Report"]]


@dataclass(frozen=True)
class CheckedNode:
    """A node whose devices and data are as its processes need them.

    Attributes:
        nccl: whether its processes communicate through NCCL.
        cached: what this process and the check have taken from the node cache.
    """

    nccl: bool
    cached: CacheStats


def check_node(
    spec: RunSpec,
    processes: int,
    reporting: Reporting,
    *,
    devices: Sequence[int] | None = None,
    here: bool = False,
) -> CheckedNode:
    """Checks the devices and the data of a node, and waits for the imports of the server of its processes.

    Args:
        processes: of this node.
        reporting: opens the display of tokenisation progress; for a fork, importable by name in another process.
        devices: numbers of the requested GPUs; by default the first ones.
        here: whether this process checks, which loads torch for it; else a fork of the server does, where there is one.

    Raises:
        CannotRun: a device is missing.
        UserError: the tokenizer cannot be loaded, or the data does not pass the audit.
        RunFailed: the fork was killed or met a bug, whose traceback it has printed.
    """
    start_server(language=is_language(spec.loaded.job))
    if FORKS and not here:
        return _check_in_fork(spec, processes, reporting, devices)
    checked = _check_here(spec, processes, reporting, devices)
    wait_for_server()
    return checked


def _check_here(spec: RunSpec, processes: int, reporting: Reporting, devices: Sequence[int] | None) -> CheckedNode:
    from stoker.hardware.process_device import check_devices
    from stoker.launch.data_gate import check_data
    from stoker.launch.worker_main import has_nccl

    check_devices(devices, processes)
    with reporting() as report:
        check_data(spec, report)
    return CheckedNode(has_nccl(), HERE.counts)


def _check_in_fork(spec: RunSpec, processes: int, reporting: Reporting, devices: Sequence[int] | None) -> CheckedNode:
    ours, theirs = CONTEXT.Pipe(duplex=False)
    arguments = (theirs, spec, processes, reporting, devices)
    process = CONTEXT.Process(target=_answer, args=arguments, name="check")
    process.start()
    theirs.close()
    answer: CheckedNode | Failure | None = None
    try:
        answer = ours.recv()
    except EOFError:
        process.join()
        why = failure_of_exit(0, process.pid, process.exitcode).problems[0].message
        raise RunFailed(Problem(f"the node's devices and data could not be checked: {why}")) from None
    finally:
        if answer is None:
            process.terminate()  # it ends its own processes, and its live line
            process.join(GRACE)
            show_cursor(sys.stderr)
        process.kill()
        process.join()
        ours.close()
    if isinstance(answer, Failure):
        raise USER_ERRORS.get(answer.kind, RunFailed)(*answer.problems)
    return replace(answer, cached=HERE.counts + answer.cached)


def _answer(to: Connection, spec: RunSpec, processes: int, reporting: Reporting, devices: Sequence[int] | None) -> None:
    """Sends the result of the check, or the failure."""
    end_with(os.getppid())  # the fork server, which ends with the supervisor
    signal.signal(signal.SIGTERM, lambda number, _: end_by(number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM,))  # also of the processes that tokenise
    with escaped_output(needs_reader=False):
        try:
            to.send(_check_here(spec, processes, reporting, devices))
        except Exception as error:
            failure = failure_of(error, 0)
            if failure.traceback:
                traceback.print_exc()
            to.send(failure)
