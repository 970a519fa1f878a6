"""The Volcano Job (batch.volcano.sh/v1alpha1): one task with one pod per node."""

from __future__ import annotations

from stoker.cluster.kubernetes.cluster_run import ClusterRun
from stoker.cluster.kubernetes.gangs import hypernodes
from stoker.cluster.kubernetes.job import CANNOT_RUN, WRONG_INPUT
from stoker.cluster.kubernetes.manifest_fields import Manifest, manifest, without_empty
from stoker.cluster.kubernetes.pod_template import CONTAINER, pod_template

UNLIMITED = 2**31 - 1  # largest value of the field


def volcano_job(run: ClusterRun) -> Manifest:
    """Returns the Job. Its policies are tried in order; exit codes that a restart cannot change end it.

    Volcano counts restarts and resumes alike, and fails the Job when the count has reached `maxRetry`; 0 means 3.
    Without retries, a failed pod ends the Job, and the count may reach any number.
    """
    retries = run.block.retries
    hopeless = [code for code in (WRONG_INPUT, CANNOT_RUN) if code != run.requeue]
    plugins = {"svc": ["--publish-not-ready-addresses=true"], **({"ssh": []} if run.block.mpi else {})}
    policies = [
        *({"exitCode": code, "action": "TerminateJob"} for code in hopeless),
        *({"exitCode": code, "action": "RestartPod"} for code in (run.requeue,) if code),
        {"event": "PodEvicted", "action": "RestartPod"},
        {"event": "PodFailed", "action": "RestartPod" if retries else "TerminateJob"},
    ]
    task = without_empty(
        name=CONTAINER,
        replicas=run.nodes,
        minAvailable=run.least,
        topologyPolicy="single-numa-node" if run.block.alignment == "numa" else None,
        policies=policies,
        template=pod_template(run),
    )
    spec = without_empty(
        schedulerName="volcano",
        minAvailable=run.least,
        queue=run.block.queue,
        priorityClassName=run.block.priority,
        networkTopology=hypernodes(run),
        maxRetry=retries + 1 if retries else UNLIMITED,
        ttlSecondsAfterFinished=run.block.ttl,
        plugins=plugins,
        tasks=[task],
    )
    return manifest(run, "batch.volcano.sh/v1alpha1", "Job", spec=spec)
