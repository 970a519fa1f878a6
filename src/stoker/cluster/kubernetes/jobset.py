"""The JobSet (jobset.x-k8s.io/v1alpha2): one indexed Job, with a set's names and restarts."""

from __future__ import annotations

from stoker.cluster.kubernetes.cluster_run import ClusterRun
from stoker.cluster.kubernetes.gangs import gang_parts
from stoker.cluster.kubernetes.job import job_spec
from stoker.cluster.kubernetes.manifest_fields import Manifest, manifest, without_empty
from stoker.cluster.kubernetes.pod_template import CONTAINER


def jobset(run: ClusterRun) -> Manifest:
    """Returns the JobSet. Its Jobs restart pods; the set fails when a Job has failed."""
    gang = gang_parts(run, CONTAINER)
    spec = {**without_empty(suspend=gang.suspend, ttlSecondsAfterFinished=run.block.ttl), **jobset_spec(run)}
    return manifest(run, "jobset.x-k8s.io/v1alpha2", "JobSet", labels=gang.labels, spec=spec)


def jobset_spec(run: ClusterRun, labels: dict[str, str] | None = None) -> Manifest:
    """Network and jobs of the set. The name of a pod is ``<run>-node-0-<index>.<run>``.

    Args:
        labels: of the Job in it.
    """
    template = without_empty(metadata=without_empty(labels=labels), spec=job_spec(run))
    return {
        "network": {"enableDNSHostnames": True, "subdomain": run.name, "publishNotReadyAddresses": True},
        "replicatedJobs": [{"name": CONTAINER, "replicas": 1, "template": template}],
    }
