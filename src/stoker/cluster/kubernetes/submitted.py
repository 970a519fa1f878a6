"""Converts a submission to a run of the cluster, and restores such a run from its config maps."""

from __future__ import annotations

import os
import signal
import socket

from stoker.cluster.environment import variables
from stoker.cluster.kubernetes.cluster_run import ClusterRun
from stoker.cluster.kubernetes.manifest_fields import Manifest
from stoker.cluster.kubernetes.node_script import JOB, RECORD
from stoker.cluster.kubernetes.sent_archive import archive_of, kept_archive
from stoker.cluster.submission import Submission, path_on_nodes
from stoker.job.targets.kubernetes import KubernetesBlock
from stoker.resilience.deadline import exit_code


def run_of_submission(submission: Submission, block: KubernetesBlock, on: str) -> ClusterRun:
    """Converts a submission for the manifests: absolute paths of the run, and its files as an archive."""
    job = submission.loaded.job
    output, to = path_on_nodes(submission.output, block.folder), job.checkpoint.to
    overrides = [f"output={output}"] if output != submission.output else []
    if to is not None and (moved := path_on_nodes(to, block.folder)) != to:
        overrides.append(f"checkpoint.to={moved}")
    return ClusterRun(
        name=submission.name,
        on=on,
        nodes=submission.nodes,
        least=submission.least,
        devices=submission.devices,
        port=submission.port,
        output=output,
        overrides=tuple(overrides),
        deadline=round(job.faults.deadline),
        requeue=exit_code(signal.SIGTERM, job.faults),
        code=submission.sends_code,
        fingerprint=submission.fingerprint,
        base=f"{socket.gethostname()}:{submission.base}",
        environment=variables(block, os.environ),
        block=block,
        job=submission.job,
        stages=submission.stages,
        archive=archive_of([file for file in submission.files if file.path != JOB]),
    )


def run_of_config_maps(kept: Manifest, *parts: Manifest) -> ClusterRun | None:
    """Restores the run from its config map and the parts of its archive; None if the map has none."""
    data = kept.get("data", {})
    if RECORD not in data or JOB not in data:
        return None
    try:
        return ClusterRun.from_record(data[RECORD], data[JOB], kept_archive(kept, parts))
    except ValueError:
        return None
