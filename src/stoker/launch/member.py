"""One process of a run that a launcher started: torchrun, srun, or any other. The launcher ends the others."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

import torch.distributed as dist

from stoker.data.build import Report
from stoker.errors import UserError
from stoker.launch.failure import Failure, LeftToAnother, error_of, failure_of, first_of
from stoker.launch.group import bind_to_loopback
from stoker.launch.join import Place
from stoker.launch.work import Ending, Work
from stoker.launch.worker import train
from stoker.runs.folder import RunFolder

SETTLE = 0.5  # seconds in which all processes that fail alike have said so


def train_as_member(work: Work, place: Place, report: AbstractContextManager[Report]) -> Ending:
    """Trains as one of the processes that a launcher started; rank 0 holds the run's folder.

    Raises:
        UserError: as `stoker.launch.worker.train` does, in the process that failed first.
        LeftToAnother: in the others.
    """
    work.failure_of(place.rank).unlink(missing_ok=True)  # of an earlier start
    if place.local_world == place.world:
        bind_to_loopback()
    try:
        return train(work, place=place, report=report, hold=_taken(work, place))
    except Exception as error:
        failures = _failures_beside(error, work, place)
        speaks = first_of(failures).rank == place.rank if failures else place.speaks
        if not speaks:
            raise LeftToAnother(error.exit_code if isinstance(error, UserError) else 1) from None
        if failures and isinstance(error, UserError):
            raise error_of(failures, world=place.world) from None
        raise


@contextmanager
def _taken(work: Work, place: Place) -> Iterator[None]:
    """Within it rank 0 holds the run's folder; that it cannot is the error of all."""
    refused: list[UserError | None] = [None]
    with ExitStack() as stack:
        if place.rank == 0:
            try:
                stack.enter_context(RunFolder(work.output).take())
            except UserError as error:
                refused = [error]
        if place.world > 1:
            dist.broadcast_object_list(refused)
        if refused[0] is not None:
            raise refused[0]
        yield


def _failures_beside(error: Exception, work: Work, place: Place) -> list[Failure]:
    """The failures of all processes so far; none where there is no folder yet to write them in."""
    if not work.output.is_dir():
        return []
    work.logs.mkdir(exist_ok=True)
    failure_of(error, place.rank).write(work.failure_of(place.rank))
    time.sleep(SETTLE)
    return work.failures()
