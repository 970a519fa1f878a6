"""One worker of a run: sets up its device and process group, then trains."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import psutil
import torch
import torch.distributed as dist

from stoker.console import Console
from stoker.data.build_cache import Report
from stoker.hardware.process_device import device_address, device_of, open_device
from stoker.hardware.processor import available_cores
from stoker.job import LoadedJob
from stoker.job.block import Auto
from stoker.job.layout import Layout, layout_of
from stoker.launch.cluster_env import RankInfo
from stoker.launch.health_checks import Checks
from stoker.launch.process_group import process_group, share_cores
from stoker.launch.run_spec import RunSpec
from stoker.parallel.mesh import Mesh
from stoker.resilience.driver_log import write_address
from stoker.resilience.heartbeat import Heart
from stoker.runs.run_folder import RunFolder
from stoker.runs.shared_memory import shared_memory
from stoker.runs.shm_folder import has_folder, shared_folder
from stoker.train.display import Display
from stoker.train.faults.out_of_memory import reported_before_training
from stoker.train.prepare import prepare
from stoker.train.run import train_run
from stoker.train.run_result import RunResult

TIMEOUT = 1800.0  # least timeout in seconds of collectives: another process may be writing a checkpoint


def train(
    spec: RunSpec,
    *,
    rank_info: RankInfo | None = None,
    console: Console | None = None,
    report: AbstractContextManager[Report | None] | None = None,
    hold: AbstractContextManager[object] | None = None,
    heart: Heart | None = None,
) -> RunResult:
    """Trains as one process of a run, or as the only one.

    Args:
        rank_info: rank and world size; None for a single process.
        console: where rank 0 shows the progress; by default standard output.
        report: context that gives the callback for tokenisation progress.
        hold: locks the run's folder, once everything is prepared: a job that fails in preparation leaves no folder.
            By default the caller holds the lock.
        heart: the heartbeat that the supervisor reads.

    Raises:
        UserError: as `stoker.train.prepare.prepare` and `stoker.train.run.train_run` do.
        CannotRun: a device is missing, or memory runs out.
    """
    first, heart = rank_info is None or rank_info.rank == 0, heart or Heart()
    with _mesh(spec, rank_info) as (loaded, mesh):
        heart.beat("prepare")
        device = mesh.device if mesh else device_of(0, spec.devices, alone=True)
        checks = Checks(spec, rank_info, device) if loaded.job.faults.check else None
        with (report if first else None) or nullcontext() as tokenised, reported_before_training(device):
            prepared = prepare(loaded, spec.base, tokenised, mesh=mesh)
        display = Display(prepared.task.unit, console=console, quiet=spec.quiet or not first)
        if loaded.plan:
            display.note(loaded.plan)
        with hold or nullcontext():
            if checks is not None:
                checks.finish(prepared, mesh.layout if mesh else Layout(), display)
            began = psutil.Process().create_time()
            folder = RunFolder(spec.output)
            result, _ = train_run(prepared, folder, spec.base, display=display, heart=heart, began=began)
        heart.beat("end")
    return result


@contextmanager
def lock_run_folder(folder: RunFolder, begun: Callable[[], None]) -> Iterator[None]:
    """Holds the lock of a run's folder, and its shared memory, within the block.

    Args:
        begun: called once both are held.
    """
    with folder.take(), shared_memory(folder.path):
        begun()
        yield


def collective_timeout(hang: float | Auto) -> float:
    """Returns the seconds that a process waits for the others: as long as the job lets one of them be silent."""
    return TIMEOUT if hang == "auto" else max(TIMEOUT, hang)


@contextmanager
def _mesh(spec: RunSpec, rank_info: RankInfo | None) -> Iterator[tuple[LoadedJob, Mesh | None]]:
    """A context in which this process has its device and its process groups; yields no mesh for a single process.

    A layout that the planner chose is broadcast from rank 0, since each machine might plan differently.
    """
    one = spec.layout.one_process
    device = device_of(rank_info.device_number if rank_info else 0, spec.devices, alone=one)
    open_device(device)
    if (address := device_address(device)) and has_folder(spec.output):
        write_address(shared_folder(spec.output), rank_info.rank if rank_info else 0, address)
    if one or rank_info is None:
        # torch may have counted the machine's cores, of which the control group allows fewer.
        torch.set_num_threads(min(torch.get_num_threads(), available_cores()))
        yield spec.loaded, None
        return
    share_cores(rank_info.local_world)
    timeout = collective_timeout(spec.loaded.job.faults.hang)
    with process_group(device, rank=rank_info.rank, world=rank_info.world, store=rank_info.store(), timeout=timeout):
        loaded = [spec.loaded]
        if spec.loaded.plan:
            dist.broadcast_object_list(loaded)
        yield loaded[0], Mesh(layout_of(loaded[0].job), device)
