"""Checks of a node's devices and data before its processes start.

They take torch and the libraries of language models, which the fork server has imported for the processes: in a fork
of it they begin at once, and the node's supervisor loads neither.
"""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from stoker.errors import Problem, RunFailed
from stoker.hardware.parent_process import end_with
from stoker.launch.first_failure import TOLD, Failure, failure_of, failure_of_exit
from stoker.launch.forkserver import START
from stoker.launch.run_spec import RunSpec

if TYPE_CHECKING:
    from stoker.data.build_cache import Report

Reporting = Callable[[], AbstractContextManager["Report"]]


def check_node(spec: RunSpec, processes: int, reporting: Reporting) -> bool:
    """Checks the devices and the data of a node; returns whether its processes communicate through NCCL.

    Args:
        processes: of this node.
        reporting: opens the display of tokenisation progress.

    Raises:
        CannotRun: a device is missing.
        UserError: the tokenizer cannot be loaded, or the data does not pass the audit.
    """
    from stoker.hardware.process_device import check_devices
    from stoker.launch.data_gate import check_data
    from stoker.launch.worker_main import has_nccl

    check_devices(None, processes)
    with reporting() as report:
        check_data(spec, report)
    return has_nccl()


def check_node_in_fork(spec: RunSpec, processes: int, reporting: Reporting) -> bool:
    """Calls `check_node` in a fork of the server, and waits for the server's imports with it.

    Args:
        reporting: importable by name in another process.

    Raises:
        CannotRun, UserError: as `check_node`.
        RunFailed: the process was killed or met a bug, whose traceback it has printed.
    """
    context = multiprocessing.get_context(START)
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(theirs, spec, processes, reporting), name="check")  # type: ignore[attr-defined]
    process.start()
    theirs.close()
    try:
        answer = ours.recv()
    except EOFError:
        process.join()
        why = failure_of_exit(0, process.pid, process.exitcode).problems[0].message
        raise RunFailed(Problem(f"the node's devices and data could not be checked: {why}")) from None
    finally:
        process.kill()
        process.join()
        ours.close()
    if isinstance(answer, Failure):
        raise TOLD.get(answer.kind, RunFailed)(*answer.problems)
    return bool(answer)


def _answer(to: Connection, spec: RunSpec, processes: int, reporting: Reporting) -> None:
    """Sends the result of `check_node`, or the failure."""
    end_with(os.getppid())  # the fork server, which ends with the supervisor
    try:
        to.send(check_node(spec, processes, reporting))
    except Exception as error:
        failure = failure_of(error, 0)
        if failure.traceback:
            traceback.print_exc()
        to.send(failure)
