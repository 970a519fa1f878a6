"""One process of a run that a launcher started (torchrun, srun or another); the launcher ends the others."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Self

from stoker.checkpoint.object_collectives import run_on_all_ranks
from stoker.data.build_cache import Report
from stoker.errors import RunFailed, UserError
from stoker.hardware.process.parent_process import STARTED_BY, end_with
from stoker.launch.cluster_env import RankInfo
from stoker.launch.exit_guard import start_exit_guard
from stoker.launch.first_failure import Failure, LeftToAnother, error_of, failure_of, first_of
from stoker.launch.host_settings import set_quirks
from stoker.launch.process_group import bind_to_loopback
from stoker.launch.reporting_process import reported_elsewhere
from stoker.launch.run_spec import RunSpec
from stoker.launch.worker import train
from stoker.resilience.heartbeat import Heart
from stoker.runs.run_folder import RunFolder
from stoker.runs.shared_memory import shared_with_others
from stoker.train.run_result import RunResult

LACKS = (
    "torchrun, srun or another launcher started this process: Stoker restarts nothing, does not say which process of "
    "several hangs, and keeps no copies in the memory of other nodes; `stoker node` does"
)
SETTLE = 0.5  # seconds within which all processes with the same failure report it


def train_as_member(spec: RunSpec, rank_info: RankInfo, report: AbstractContextManager[Report]) -> RunResult:
    """Trains as one of the processes that a launcher started; rank 0 locks the run's folder.

    Raises:
        UserError: as `stoker.launch.worker.train` does, in the process that failed first.
        LeftToAnother: in the others.
    """
    starts = _Starts.of(os.environ)
    if starts is not None:
        end_with(STARTED_BY)  # a killed agent would leave this process running
        rank_info = replace(rank_info, meet=starts.meet, agent=True) if rank_info.world > 1 else rank_info
    spec.failure_of(rank_info.rank).unlink(missing_ok=True)  # of an earlier start
    if rank_info.local_world == rank_info.world:
        bind_to_loopback()
    if rank_info.rank == 0 and not spec.quiet:
        print(LACKS, flush=True)
    words = set_quirks(rank_info)
    if words and rank_info.local_rank == 0 and not spec.quiet:
        print(f"host       {words}", flush=True)
    heart = Heart()
    start_exit_guard(heart, spec, rank_info.rank)
    try:
        return train(spec, rank_info=rank_info, report=report, hold=_taken(spec, rank_info, starts), heart=heart)
    except Exception as error:
        heart.beat("end")
        failures = _failures_beside(error, spec, rank_info)
        if first_of(failures).rank != rank_info.rank if failures else reported_elsewhere(rank_info):
            raise LeftToAnother(error.exit_code if isinstance(error, UserError) else 1) from None
        if failures and isinstance(error, UserError):
            raise error_of(failures, world=rank_info.world) from None
        if failures and first_of(failures).consequence:
            why = str(first_of(failures).problems[0]).partition(" This is typically")[0]
            raise RunFailed(
                f"rank {rank_info.rank}: another process of the run has ended, as the launcher's own log says ({why}). "
                "When the launcher or the same command starts it again, the run resumes from its newest state"
            ) from error
        raise


@dataclass(frozen=True)
class _Starts:
    """The variables that torchrun's agent sets for the processes that it starts.

    Attributes:
        meet: host and port of the agents' store.
        number: restarts so far.
        most: maximum number of restarts.
    """

    meet: tuple[str, int]
    number: int
    most: int

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Self | None:
        """Reads the variables; None if another launcher started this process."""
        if environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            return None
        number, most = (int(environment[f"TORCHELASTIC_{name}"]) for name in ("RESTART_COUNT", "MAX_RESTARTS"))
        return cls((environment["MASTER_ADDR"], int(environment["MASTER_PORT"])), number, most)


@contextmanager
def _taken(spec: RunSpec, rank_info: RankInfo, starts: _Starts | None) -> Iterator[None]:
    """A context in which rank 0 locks the run's folder and all share memory; a failing lock is raised in all ranks."""
    with ExitStack() as stack:
        run_on_all_ranks(lambda: stack.enter_context(RunFolder(spec.output).take()) if rank_info.rank == 0 else None)
        is_new = max(run_on_all_ranks(lambda: starts.number if starts is not None else 0)) == 0
        first = rank_info.local_rank == 0
        with shared_with_others(
            spec.output,
            clears=first and is_new,
            removes=first,
            again=starts is not None and starts.number < starts.most,
            wait=lambda: run_on_all_ranks(lambda: None),
        ):
            yield


def _failures_beside(error: Exception, spec: RunSpec, rank_info: RankInfo) -> list[Failure]:
    """Records this process' failure; returns those of all processes so far, none if the run's folder does not exist."""
    if not spec.output.is_dir():
        return []
    with suppress(OSError):  # the disk may be what failed
        spec.logs.mkdir(exist_ok=True)
        failure_of(error, rank_info.rank).write(spec.failure_of(rank_info.rank))
    time.sleep(SETTLE)
    return spec.failures(range(rank_info.world))  # the folder may have those of an earlier, larger world
