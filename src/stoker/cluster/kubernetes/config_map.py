"""The config map with what is sent: the job, its files as an archive, and what is needed to find the run again."""

from __future__ import annotations

import base64
import io
import tarfile
from collections.abc import Sequence

from stoker.cluster.kubernetes.cluster_run import ClusterRun
from stoker.cluster.kubernetes.manifest_fields import Manifest, given, metadata
from stoker.cluster.kubernetes.node_script import ARCHIVE, DRIVER, HOSTFILE, JOB, RECORD
from stoker.cluster.kubernetes.rayjob import driver_plan
from stoker.cluster.sent_files import SentFile

LARGEST = 1_000_000  # bytes; Kubernetes takes 1 MiB with names and all


def config_map(run: ClusterRun) -> Manifest:
    """The config map. It cannot change: a pod that starts again finds what the first one found."""
    data = {JOB: run.job, RECORD: run.record_text()}
    if run.block.mpi and run.kind != "rayjob":
        data[HOSTFILE] = "".join(f"{run.host(index)} slots={run.devices}\n" for index in range(run.nodes))
    if run.kind == "rayjob":
        data[DRIVER] = driver_plan(run)
    archive = base64.b64encode(run.archive).decode() if run.archive is not None else None
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(run),
        **given(immutable=True, data=data, binaryData=given(**{ARCHIVE: archive})),
    }


def archive_of(files: Sequence[SentFile]) -> bytes | None:
    """The files as a tar.xz that depends on their names and contents alone; None for no files."""
    if not files:
        return None
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:xz", format=tarfile.PAX_FORMAT) as archive:
        for file in sorted(files, key=lambda file: file.path):
            content = file.read()
            entry = tarfile.TarInfo(file.path)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def size_of(run: ClusterRun) -> int:
    """Bytes that Kubernetes counts."""
    return len(run.job.encode()) + len(run.record_text().encode()) + len(run.archive or b"")
