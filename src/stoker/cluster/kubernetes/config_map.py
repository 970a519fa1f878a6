"""The config maps of a run: the job, its files as an archive, and the record by which the run is found again."""

from __future__ import annotations

import base64
from collections.abc import Sequence

from stoker.cluster.kubernetes.cluster_run import ClusterRun
from stoker.cluster.kubernetes.manifest_fields import Manifest, manifest, without_empty
from stoker.cluster.kubernetes.node_script import DRIVER, HOSTFILE, JOB, RECORD
from stoker.cluster.kubernetes.rayjob import driver_plan
from stoker.cluster.kubernetes.sent_archive import ARCHIVE, part_map, parts_of


def config_maps(run: ClusterRun) -> list[Manifest]:
    """Returns the run's own config map, and one for each part of an archive that does not fit into it.

    They are immutable: a restarted pod reads the same files as the first one.
    """
    parts = parts_of(run)
    if len(parts) < 2:
        return [_own(run, parts)]
    more = [
        manifest(
            run,
            "v1",
            "ConfigMap",
            name=part_map(run.name, index),
            immutable=True,
            binaryData={f"{ARCHIVE}.{index}": base64.b64encode(part).decode()},
        )
        for index, part in enumerate(parts)
    ]
    return [_own(run, []), *more]


def _own(run: ClusterRun, parts: Sequence[bytes]) -> Manifest:
    data = {JOB: run.job, RECORD: run.record_text()}
    if run.block.mpi and run.kind != "rayjob":
        data[HOSTFILE] = "".join(f"{run.host(index)} slots={run.devices}\n" for index in range(run.nodes))
    if run.kind == "rayjob":
        data[DRIVER] = driver_plan(run)
    archive = base64.b64encode(parts[0]).decode() if parts else None
    fields = without_empty(immutable=True, data=data, binaryData=without_empty(**{ARCHIVE: archive}))
    return manifest(run, "v1", "ConfigMap", **fields)
