"""The indexed Job (batch/v1): one pod per node, with a stable name, restarted according to its exit code."""

from __future__ import annotations

from stoker.cluster.kubernetes.cluster_run import ClusterRun
from stoker.cluster.kubernetes.gangs import gang_parts
from stoker.cluster.kubernetes.manifest_fields import Manifest, manifest, without_empty
from stoker.cluster.kubernetes.pod_template import CONTAINER, pod_template

WRONG_INPUT, CANNOT_RUN = 2, 3  # exit codes of Stoker that another start cannot change


def job(run: ClusterRun) -> Manifest:
    """Returns the Job."""
    gang = gang_parts(run, CONTAINER)
    spec = {**without_empty(suspend=gang.suspend), **job_spec(run, ttl=run.block.ttl)}
    return manifest(run, "batch/v1", "Job", labels=gang.labels, spec=spec)


def job_spec(run: ClusterRun, *, ttl: int | None = None) -> Manifest:
    """Returns the specification of the Job, which a JobSet and a training runtime contain, too.

    A pod that fails is restarted up to `retries` times, but not after an exit code of an invalid job;
    an eviction, or the loss of a node, is not counted. A run saves and ends on all nodes when one of them gets
    a signal, so the pods other than an evicted one end, too, with the exit code for a restart.
    """
    hopeless = [code for code in (WRONG_INPUT, CANNOT_RUN) if code != run.requeue]
    rules = [
        {"action": "FailJob", "onExitCodes": _codes(hopeless)},
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "Ignore", "onExitCodes": _codes([run.requeue])},
    ]
    return without_empty(
        completionMode="Indexed",
        completions=run.nodes,
        parallelism=run.nodes,
        backoffLimitPerIndex=run.block.retries,
        maxFailedIndexes=0,
        podFailurePolicy={"rules": rules},
        podReplacementPolicy="Failed",
        activeDeadlineSeconds=run.block.time_limit,
        ttlSecondsAfterFinished=ttl,
        template=pod_template(run),
    )


def _codes(values: list[int]) -> Manifest:
    return {"containerName": CONTAINER, "operator": "In", "values": values}
