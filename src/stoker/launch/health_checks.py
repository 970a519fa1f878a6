"""Health checks of every device and machine, before training and after a fault."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist

from stoker.checkpoint.dcp_store import place_of
from stoker.checkpoint.disk_space import SPARE
from stoker.checkpoint.object_collectives import run_on_all_ranks
from stoker.checkpoint.run_weights import trainable
from stoker.errors import CannotRun, Problem
from stoker.job.layout import Layout
from stoker.launch.cluster_env import RankInfo
from stoker.launch.run_spec import RunSpec
from stoker.launch.shrink import leave_out
from stoker.parallel.shard_spec import local_shard
from stoker.resilience.device_test import (
    check_device,
    code_differs,
    data_differs,
    find_faults,
    measure_disk,
)
from stoker.resilience.link_check import check_links, exchange_with
from stoker.runs.run_folder import RunFolder
from stoker.train.display import Display
from stoker.train.optim.optimizer import STATE_TENSORS
from stoker.train.prepared import Prepared


class Checks:
    """The checks of one start: of the devices once the processes can communicate, of the rest once all is prepared."""

    def __init__(self, spec: RunSpec, rank_info: RankInfo | None, device: torch.device) -> None:
        """Tests the devices; a collective.

        Raises:
            CannotRun: one of them fails its check.
        """
        self._spec = spec
        self._rank = rank_info.rank if rank_info else 0
        self._is_first_here = rank_info is None or rank_info.local_rank == 0
        node = (rank_info.node if rank_info else "") or socket.gethostname()
        self.links = check_links(node, exchange_with(device))  # first: every other check would hang on a broken link
        self.found = self.links.findings(on_cpu=device.type == "cpu") if self.links else []
        self._leave_out()
        self.reports = run_on_all_ranks(lambda: check_device(device, self._rank))
        self.found += find_faults(self.reports)
        self._leave_out()
        other = code_differs(self.reports)
        if other is not None:
            raise CannotRun(
                Problem(
                    f"rank {other.rank} on {other.host} runs other code than rank 0 on {self.reports[0].host}",
                    "install the same Stoker, Python and PyTorch on all machines",
                )
            )

    def _leave_out(self) -> None:
        """Ends this start where training without a device or a node is better."""
        out = [finding for finding in self.found if finding.out]
        if not out:
            return
        if self._rank == 0:
            leave_out(self._spec, [rank for finding in out for rank in finding.ranks])
        raise CannotRun(
            *[Problem(finding.message, "leave it out with `parallel.devices`, or `lost: shrink`") for finding in out]
        )

    def finish(self, prepared: Prepared, layout: Layout, display: Display) -> None:
        """Compares the data, checks the disk, and records the results; a collective.

        Raises:
            CannotRun: a machine reads other data, or there is no room for the first checkpoint.
        """
        differs = data_differs(prepared.fingerprints)
        if differs is not None:
            rank, name = differs
            raise CannotRun(
                Problem(
                    f"rank {rank} on {self.reports[rank].host} reads other data in {name} than rank 0 on "
                    f"{self.reports[0].host}",
                    "give all machines the same files",
                )
            )
        needed = state_bytes(prepared, layout)
        run = RunFolder(self._spec.output)
        place = place_of(prepared.job.checkpoint.to, run, self._spec.base)
        free = rate = None
        if isinstance(place, Path) and self._is_first_here:
            free, rate = check_disk(place, needed, run)
        for finding in self.found:
            display.note(finding.message)
        if self._rank == 0:
            run.event("checked", **self._values(needed, free, rate))

    def _values(self, needed: int, free: int | None, rate: float | None) -> Mapping[str, object]:
        reports = self.reports
        gflops = {report.where: round(report.rate / 1e9, 1) for report in reports}
        values: dict[str, object] = {"seconds": round(max(r.seconds for r in reports), 3), "gflops": gflops}
        if len(reports) > 1:
            values["reduce_mb_s"] = round(min(r.reduce for r in reports) / 1e6, 1)
        if self.links is not None:
            values["links_mb_s"] = {name: round(rate / 1e6, 1) for name, rate in self.links.rates.items()}
        if free is not None and rate is not None:
            values |= {"disk_free": free, "checkpoint": needed, "disk_mb_s": round(rate / 1e6, 1)}
        return {**values, "found": [finding.message for finding in self.found]}


def check_disk(folder: Path, needed: int, run: RunFolder) -> tuple[int | None, float | None]:
    """Returns the free bytes and the write rate where checkpoints go; None if nothing can be written there.

    A run that has begun goes on even so, as its newest state may be in memory only; its next checkpoint reports it.
    This helps where only `checkpoint.to` cannot be written: without room in the run's own folder, where its records go,
    a start fails, and the copies in memory stay.

    Args:
        needed: bytes of a checkpoint.

    Raises:
        CannotRun: a run that has not begun cannot write its first checkpoint.
    """
    problem = ""
    free, rate = None, None
    try:
        free, rate = measure_disk(folder)
        if free < needed + SPARE and not list(folder.glob("step-*")):
            room, size, spare = (f"{number / 2**20:,.1f} MiB" for number in (free, needed, SPARE))
            problem = f"{folder} has room for {room}, and a checkpoint takes {size} and leaves {spare} free"
    except OSError as error:
        problem = f"{folder}, where checkpoints go, cannot be written ({error.strerror})"
    if problem and not run.has_begun():
        raise CannotRun(Problem(problem, "make room, or give another place with `checkpoint.to`"))
    return free, rate


def state_bytes(prepared: Prepared, layout: Layout) -> int:
    """Estimates the size of a checkpoint: trained parameters with the optimizer's moments; a collective."""
    parameters = trainable(prepared.task.model).values()
    held = [local_shard(p) for p in parameters]
    mine = torch.tensor(sum(p.numel() * p.element_size() for p in held), dtype=torch.int64)
    if dist.is_initialized():
        dist.all_reduce(mine)
    train = prepared.job.train
    parts = layout.tensor * layout.pipeline * (layout.sharers if layout.zero == 3 else 1)
    return int(mine) * parts // layout.world * (1 + STATE_TENSORS[train.optimizer] + (train.average is not None))
