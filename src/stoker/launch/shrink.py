"""Shrinks a job to fewer devices: training continues without a lost one, with the same batch."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from stoker.errors import CannotRun
from stoker.hardware.machines.cluster import Cluster
from stoker.job.document.yaml_document import JobDocument, Mark
from stoker.job.keys.key_paths import KeyPath
from stoker.job.layout import layout_of
from stoker.job.load_job import JobError, LoadedJob, check_document, with_nodes
from stoker.launch.run_spec import RunSpec
from stoker.runs.shm_folder import has_folder, shared_folder

OUT = "left-out.json"


def with_fewer(
    current: LoadedJob,
    read: JobDocument,
    *,
    devices: list[int] | None,
    left: int,
    cluster_of: Callable[[int], Cluster],
    nodes_of: Callable[[int], int] = lambda world: 1,
) -> LoadedJob | None:
    """Returns the job for at most ``left`` processes: with a smaller data-parallel size, or replanned if it was
    planned.

    The batch is unchanged; passes and accumulation follow from it. None if no layout is possible.

    Args:
        current: the job that ran.
        read: the job as it was read, with `parallel: auto` where that was written.
        devices: numbers of the remaining GPUs; None on processors.
        cluster_of: maps a number of processes to the devices that they have, for the planner.
        nodes_of: maps a number of processes to its number of nodes; see `stoker.job.load_job.with_nodes`.
    """
    if read.planned:
        return _planned(current.job.train.batch, read, devices, left, cluster_of, nodes_of)
    layout, batch = layout_of(current.job), current.job.train.batch
    unit = layout.world // layout.data
    sharded = layout.shard_size if layout.shard_size < layout.data else None
    for data in range(min(layout.data - 1, left // unit), 0, -1):
        values: dict[str, Any] = {"parallel.data": data, "train.batch": batch}
        dropped = ["train.accumulation", "parallel.shard_size"]
        if devices is not None:
            values["parallel.devices"] = devices[: data * unit]
        if sharded is not None and data % sharded == 0 and data > sharded:
            dropped.remove("parallel.shard_size")
        if data == layout.context == 1:
            dropped += ["parallel.shard", "parallel.compress", "parallel.compress_rank"]
            values |= {"parallel.offload": "optimizer"} if layout.offload == "params" else {}  # the former needs zero3
        # Islands go where the copies that are left cannot form them.
        for also in ((), ("train.micro_batch",), ("parallel.sync",), ("train.micro_batch", "parallel.sync")):
            document = _written(current.document, values, dropped=(*dropped, *also))
            try:
                found = with_nodes(check_document(document), nodes_of(data * unit))
            except JobError:
                continue
            if layout_of(found.job).world == data * unit:
                return found
    return None


def _planned(
    batch: int,
    read: JobDocument,
    devices: list[int] | None,
    left: int,
    cluster_of: Callable[[int], Cluster],
    nodes_of: Callable[[int], int],
) -> LoadedJob | None:
    """Returns the job planned for the most processes that a layout with its batch exists for; None if there is none."""
    from stoker.launch.auto_parallel import with_plan

    # The planner may split otherwise than over data, so devices are named only in what it has planned.
    document = _written(read, {"train.batch": batch}, dropped=("parallel.devices",))
    for most in range(left, 0, -1):
        with suppress(CannotRun, JobError):
            found = with_plan(check_document(document), cluster=cluster_of(most))
            world = layout_of(found.job).world
            if devices is not None:
                named = check_document(_written(found.document, {"parallel.devices": devices[:world]}, dropped=()))
                found = replace(found, job=named.job, document=named.document)
            return with_nodes(found, nodes_of(world))
    return None


def leave_out(spec: RunSpec, ranks: list[int]) -> None:
    """Reports ranks with failing devices to the supervisor; does nothing under a launcher."""
    if has_folder(spec.output):
        (shared_folder(spec.output) / OUT).write_text(json.dumps(ranks))


def left_out(spec: RunSpec) -> list[int]:
    """Returns the ranks that `leave_out` reported, and clears the report."""
    path = shared_folder(spec.output) / OUT
    if not has_folder(spec.output) or not path.is_file():
        return []
    ranks: list[int] = json.loads(path.read_text())
    path.unlink()
    return ranks


def _written(document: JobDocument, values: dict[str, Any], *, dropped: tuple[str, ...]) -> JobDocument:
    """Returns the document with other values of keys ``block.key``, and without some."""
    data = {name: dict(value) if isinstance(value, dict) else value for name, value in document.data.items()}
    marks: dict[KeyPath, Mark] = dict(document.marks)
    for key in dropped:
        block, name = key.split(".")
        if isinstance(data.get(block), dict):
            data[block].pop(name, None)
            marks.pop((block, name), None)
    for key, value in values.items():
        block, name = key.split(".")
        holder = data.setdefault(block, {})
        holder[name] = value
        marks.setdefault((block, name), Mark(document.file, (1, 1), (1, 1)))
    return replace(document, data=data, marks=marks)
