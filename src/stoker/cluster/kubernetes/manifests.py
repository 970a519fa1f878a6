"""All objects of a run, in order of creation."""

from __future__ import annotations

from collections.abc import Callable

from stoker.cluster.kubernetes.cluster_run import ClusterRun
from stoker.cluster.kubernetes.config_map import config_maps
from stoker.cluster.kubernetes.device_claims import claim_template, claims
from stoker.cluster.kubernetes.fluid import fluid_objects
from stoker.cluster.kubernetes.gangs import pod_group
from stoker.cluster.kubernetes.job import job
from stoker.cluster.kubernetes.jobset import jobset
from stoker.cluster.kubernetes.manifest_fields import Manifest
from stoker.cluster.kubernetes.rayjob import rayjob
from stoker.cluster.kubernetes.secret import ORIGIN, channel_secret
from stoker.cluster.kubernetes.service import service
from stoker.cluster.kubernetes.trainjob import training_runtime, trainjob
from stoker.cluster.kubernetes.volcano_job import volcano_job
from stoker.cluster.kubernetes.yaml_documents import as_yaml

WORKLOADS: dict[str, Callable[[ClusterRun], Manifest]] = {
    "job": job,
    "jobset": jobset,
    "volcano": volcano_job,
    "trainjob": trainjob,
    "rayjob": rayjob,
}


def manifests(run: ClusterRun, *, secret: str | None) -> list[Manifest]:
    """Returns every object of the run. The workload is the last one, after the objects that its pods mount.

    Args:
        secret: value of the channel's secret; None for a preview.
    """
    found = config_maps(run)
    if run.kind != "rayjob":
        found.append(channel_secret(run, value=secret))
    if run.kind == "job":
        found.append(service(run))
    found += fluid_objects(run)
    if claims(run):
        found.append(claim_template(run))
    group = pod_group(run)
    if group is not None:
        found.append(group)
    if run.kind == "trainjob":
        found.append(training_runtime(run))
    return [*found, workload(run)]


def workload(run: ClusterRun) -> Manifest:
    """Returns the object that makes the pods."""
    return WORKLOADS[run.kind](run)


def preview(run: ClusterRun) -> str:
    """Returns the objects as YAML, with the origin of the secret's value instead of the value."""
    return as_yaml(manifests(run, secret=None), {"Secret": f"stringData.channel is not shown: {ORIGIN}"})
