"""Start a run on this machine: its spec, the lock of its folder, and the processes that train."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from stoker.cli.output.print_problems import print_notes
from stoker.cli.preflight import with_planned_layout
from stoker.errors import Ended, Interrupted, RunFailed, UserError
from stoker.job import LoadedJob
from stoker.job.load_job import with_nodes
from stoker.job.task_spec import is_language

if TYPE_CHECKING:
    from stoker.launch.cluster_env import RankInfo
    from stoker.launch.run_spec import RunSpec
    from stoker.runs.run_folder import RunFolder
    from stoker.train.run_result import RunResult


def spec_of(opened: LoadedJob, rank_info: RankInfo | None, *, quiet: bool) -> RunSpec:
    """Returns the run's spec, with the planner's layout if the job asks for it."""
    from stoker.cli.output.quiet_libraries import quiet_environment, quiet_libraries

    if rank_info is None and opened.job.faults.restarts:
        from stoker.launch.forkserver import start_server

        quiet_environment()
        # It imports the workers' modules, in parallel to this process.
        start_server(language=is_language(opened.job))
    loaded = with_nodes(with_planned_layout(opened, rank_info), 1 if rank_info is None else rank_info.nodes)
    from stoker.launch.cluster_env import check_world
    from stoker.launch.run_spec import RunSpec

    quiet_libraries()
    base = Path.cwd()
    spec = RunSpec(loaded, base, base / loaded.job.output, quiet=quiet, read=opened.document)
    if rank_info is not None:
        check_world(rank_info, spec.layout)
    return spec


def trained(spec: RunSpec, rank_info: RankInfo | None = None, begun: Callable[[], None] | None = None) -> RunResult:
    """Trains in the process that a launcher started, in this one, or in workers that this one starts.

    Args:
        begun: called when the run's folder is locked, before training; not with a launcher.

    Raises:
        Ended: a signal, or another process of a launcher's, ended it before it had a result.
    """
    with printed_ending(spec):
        return _train(spec, rank_info, begun or (lambda: None))


@contextmanager
def printed_ending(spec: RunSpec) -> Iterator[None]:
    """Prints the notes of a signal or of a failed process that ends a run.

    Raises:
        Ended: a signal ended it.
    """
    from stoker.launch.first_failure import RankFailed
    from stoker.resilience.deadline import exit_code

    try:
        yield
    except Interrupted as interrupted:
        print_notes(interrupted)
        raise Ended(exit_code(interrupted.number, spec.loaded.job.faults)) from None
    except RankFailed as error:
        print_notes(error)
        raise


def _train(spec: RunSpec, rank_info: RankInfo | None, begun: Callable[[], None]) -> RunResult:
    from stoker.cli.output.tokenise_report import TokeniseReport, quiet_report
    from stoker.launch.supervisor import train_here
    from stoker.runs.run_folder import RunFolder

    folder = RunFolder(spec.output)
    if rank_info is not None:
        from stoker.launch.external_worker import train_as_member

        return train_as_member(spec, rank_info, TokeniseReport())
    if spec.layout.one_process and not spec.loaded.job.faults.restarts:  # else this process must outlive the trainer
        from stoker.hardware.process_device import check_devices
        from stoker.launch.worker import lock_run_folder, train

        check_devices(spec.devices, spec.layout.world)
        return train(spec, report=TokeniseReport(), hold=lock_run_folder(folder, begun))
    from stoker.launch.start_checks import check_node

    checked = check_node(spec, spec.layout.world, quiet_report, devices=spec.devices)
    spec = replace(spec, cached=checked.cached)
    with take_folder(folder):
        begun()
        return train_here(spec, nccl=checked.nccl)


@contextmanager
def take_folder(folder: RunFolder) -> Iterator[bool]:
    """Locks a run's folder; yields whether it is new.

    If it is, and the block ends with an error of the job or the machine before training began, it is removed.
    """
    with folder.take() as is_new:
        try:
            yield is_new
        except UserError as error:
            if is_new and not isinstance(error, RunFailed) and not folder.has_begun():
                shutil.rmtree(folder.path)
            raise
