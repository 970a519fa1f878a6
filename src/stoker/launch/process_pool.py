"""A pool of processes that run functions together, for verifying layouts."""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import pickle
import signal
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from stoker.frames import new_secret
from stoker.hardware.process.parent_process import end_with
from stoker.hardware.process_device import open_device
from stoker.launch.first_failure import USER_ERRORS, Failure, error_of, failure_of, failure_of_exit
from stoker.launch.forkserver import CONTEXT, start_server
from stoker.launch.process_group import bind_to_loopback, process_group, seal_objects

Result = TypeVar("Result")
GRACE = 2.0  # seconds that the others get to end by themselves when one has failed


@dataclass(frozen=True)
class _Call:
    """One function call for all ranks: ``work`` is pickled, so that a rank can first set its import path.

    Attributes:
        meet: the rendezvous file of the ranks.
    """

    meet: str
    world: int
    timeout: float
    wait: float
    paths: list[str]
    work: bytes


@dataclass
class _Worker:
    process: BaseProcess
    connection: Connection


class Pool:
    """Up to ``size`` processes of one thread each, started on first use and kept.

    >>> with Pool(4) as pool:
    ...     pool.run(total_of, tensor, world=4)

    Each call gives its ranks a separate process group and destroys it afterwards; with one rank there is none.
    Changes that a function makes to its process (registries, default types) persist: functions should undo them.

    Args:
        environment: variables that the processes set before they open their devices.
    """

    def __init__(self, size: int, *, device: str = "cpu", environment: Mapping[str, str] | None = None) -> None:
        self.size, self.device, self._environment = size, device, dict(environment or {})
        self._workers: dict[int, _Worker] = {}
        self._calls = 0
        self._secret = new_secret()
        self._folder = TemporaryDirectory(prefix="stoker-pool-")  # a file for each call, where its ranks meet
        self.close: Callable[[], Any] = weakref.finalize(self, _end, self._workers, self._folder)

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(
        self,
        function: Callable[..., Result],
        *arguments: Any,
        world: int | None = None,
        timeout: float = 120.0,
        wait: float | None = None,
    ) -> list[Result]:
        """Calls ``function(*arguments)`` on the first ``world`` processes; returns each rank's result.

        A rank finds its number with ``torch.distributed.get_rank()``; the random state begins at 0 in every call.

        Args:
            function: importable by name in another process.
            arguments, results: are pickled.
            timeout: seconds.
            wait: seconds that a rank waits for the others in one collective; by default ``timeout``.

        Raises:
            UserError: a rank raised one; of the same class, with the same message.
            RankFailed: a rank raised anything else, or died; the first one, with its traceback as a note.
            TimeoutError: a rank did not end in time; its stack is on stderr.
        """
        world = world or self.size
        if world > self.size:
            raise ValueError(f"{world} ranks are asked of a pool of {self.size}")
        self._start(world)
        self._calls += 1
        work = pickle.dumps((function, arguments))
        meet = f"{self._folder.name}/{self._calls}"
        call = pickle.dumps(_Call(meet, world, timeout, wait or timeout, sys.path, work))
        try:
            for rank in range(world):
                self._workers[rank].connection.send_bytes(call)
            answers = self._collect(world, timeout)
        except BaseException:  # an interrupt too: no rank may continue with half a call
            self._end(range(world))
            raise
        missing = [rank for rank in range(world) if rank not in answers]
        # A rank whose group failed counts its groups differently from then on, so the ranks would no longer meet.
        # Groups of GPUs outlive an error (`process_group`).
        ends = {
            r
            for r, a in answers.items()
            if isinstance(a, Failure) and (a.kind not in USER_ERRORS or self.device == "cuda")
        }
        self._end([*missing, *ends])
        failures = [answer for answer in answers.values() if isinstance(answer, Failure)]
        if failures:
            raise error_of(failures, world=world)
        if missing:
            raise TimeoutError(f"ranks {missing} of {world} did not end within {timeout:g} s; their stacks are above")
        return [answers[rank][0] for rank in range(world)]

    def _collect(self, world: int, timeout: float) -> dict[int, Any]:
        """Returns the ranks' answers, each a tuple of the result, or a failure; unfinished ranks have none."""
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + timeout + GRACE
        while len(answers) < world and (left := deadline - time.monotonic()) > 0:
            asked = {self._workers[rank].connection: rank for rank in range(world) if rank not in answers}
            for connection in wait(list(asked), left):
                assert isinstance(connection, Connection)
                rank = asked[connection]
                answers[rank] = self._answer(rank, connection)
                if isinstance(answers[rank], Failure):
                    deadline = min(deadline, time.monotonic() + GRACE)
        return answers

    def _answer(self, rank: int, connection: Connection) -> Any:
        try:
            return pickle.loads(connection.recv_bytes())
        except (EOFError, ConnectionError):
            process = self._workers[rank].process
            process.join()
            self._end([rank])
            return failure_of_exit(rank, process.pid, process.exitcode)

    def _start(self, world: int) -> None:
        start_server()
        for rank in range(world):
            if rank not in self._workers:
                ours, theirs = CONTEXT.Pipe()
                arguments = (theirs, rank, self.device, self._environment, self._secret)
                process = CONTEXT.Process(target=_serve, args=arguments, name=f"rank-{rank}")
                process.start()
                theirs.close()  # the process has its own: when it dies, ours ends
                self._workers[rank] = _Worker(process, ours)

    def _end(self, ranks: Any) -> None:
        _end_all({rank: self._workers.pop(rank) for rank in ranks if rank in self._workers})


def _end(workers: dict[int, _Worker], folder: TemporaryDirectory[str]) -> None:
    _end_all(workers)
    folder.cleanup()


def _end_all(workers: dict[int, _Worker]) -> None:
    for worker in workers.values():
        worker.process.kill()
        worker.connection.close()
    for worker in workers.values():
        worker.process.join()
    workers.clear()


# -- in the processes --------------------------------------------------------------------------------------


def _serve(connection: Connection, rank: int, device_type: str, environment: Mapping[str, str], secret: bytes) -> None:
    """Runs one call after another, until the parent is gone."""
    end_with(os.getppid())  # the fork server ends with the process that started it
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its ranks
    logging.disable(logging.WARNING)  # advice of libraries to their own users
    warnings.filterwarnings("ignore", category=FutureWarning)
    os.environ |= environment
    os.environ["OMP_NUM_THREADS"] = "1"  # of processes that a rank starts
    # None is done with a call before all have met: its sockets would close on those that still look for them.
    os.environ["TORCH_DIST_INIT_BARRIER"] = "1"
    torch.set_num_threads(1)
    device = torch.device(device_type, rank) if device_type == "cuda" else torch.device(device_type)
    open_device(device)
    bind_to_loopback()
    seal_objects(secret)
    gc.freeze()  # the libraries, half a million objects, are not looked through after each call
    while True:
        try:
            call: _Call = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        connection.send_bytes(_answered(call, rank, device))


def _answered(call: _Call, rank: int, device: torch.device) -> bytes:
    """Returns the call's result in a tuple, or the rank's failure; pickled."""
    faulthandler.dump_traceback_later(call.timeout)
    try:
        sys.path[:] = call.paths
        function, arguments = pickle.loads(call.work)
        torch.manual_seed(0)
        if call.world == 1:
            return pickle.dumps((function(*arguments),))
        store = dist.FileStore(call.meet, call.world)
        with process_group(device, rank=rank, world=call.world, store=store, timeout=call.wait):
            return pickle.dumps((function(*arguments),))
    except BaseException as error:
        return pickle.dumps(failure_of(error, rank))
    finally:
        faulthandler.cancel_dump_traceback_later()
        _forget_groups()


def _forget_groups() -> None:
    """Ends the threads of the call's groups, which wake a hundred times a second while the group is referenced."""
    _clear_sharding_prop_cache()
    gc.collect()
