"""A setting and a cluster in the syntax of job files and the command line."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from stoker.hardware.machines.cluster import Cluster, cluster_of
from stoker.hardware.machines.nodes import node_type, reference_node
from stoker.job.document.job_to_yaml import INDENT, scalar
from stoker.job.resolution.batch_solver import divisors
from stoker.plan.planned_job import parallel_block
from stoker.plan.setting import Setting

UNITS = ((365.25 * 86400, "years"), (86400.0, "days"), (3600.0, "h"), (60.0, "min"))


def job_values(setting: Setting) -> dict[str, dict[str, Any]]:
    """Keys of a job that select the setting, by block, without defaults."""
    train = {
        "batch": setting.layout.data * setting.micro_batch * setting.micro_batches,
        "micro_batch": setting.micro_batch,
        "accumulation": setting.micro_batches,
    }
    block = parallel_block(setting.layout)
    parallel = {key: value for key, value in block.items() if key == "data" or value not in (1, "none")}
    return {"train": train, "parallel": parallel}


def job_yaml(setting: Setting) -> str:
    """`job_values` as lines of a job file."""
    lines = []
    for block, values in job_values(setting).items():
        lines += [f"{block}:", *(f"{' ' * INDENT}{key}: {scalar(value)}" for key, value in values.items())]
    return "".join(f"{line}\n" for line in lines)


def is_file(like: str) -> bool:
    """Returns whether ``--on like`` names a cluster's file."""
    return Path(like).suffix.lower() in (".yaml", ".yml")


def cluster_words(cluster: Cluster, *, like: str, was: Cluster) -> str:
    """Returns the ``--on`` option for a cluster that differs from ``--on like`` in its nodes or its device.

    Where ``like`` is a cluster's file, the change to make in it.
    """
    if is_file(like):
        key = f"nodes: {cluster.nodes}" if cluster.nodes != was.nodes else f"device: {cluster.device.name}"
        return f"{key} in {like}"
    kind = node_type(cluster.name)
    name = kind.name if kind is not None and kind.device == cluster.device.name else cluster.device.name
    return f"--on {cluster.nodes}x{cluster.per_node}x{name}"


def fuller_nodes(cluster: Cluster, *, like: str) -> Iterator[Cluster]:
    """Yields nodes with more of the cluster's devices, up to the usual number, if the cluster is a part of one node."""
    if cluster.nodes > 1 or is_file(like):
        return
    for count in divisors(reference_node(cluster.device).per_node):
        if count > cluster.per_node:
            yield replace(cluster_of(cluster.device, gpus=count), name="")


def time_words(seconds: float) -> str:
    """Formats a duration in the largest unit of which it has more than two."""
    for unit, name in UNITS:
        if seconds > 2 * unit:
            return f"{seconds / unit:,.1f} {name}"
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
