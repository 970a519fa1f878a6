"""The TrainJob of the Kubeflow trainer (trainer.kubeflow.org/v1alpha1), and the training runtime that it refers to.

The runtime belongs to the run: a JobSet as `stoker.cluster.kubernetes.jobset` makes it, so that a TrainJob has the
volumes, devices and retries that the other kinds have. It has no `torch` policy, so the trainer sets no variables.
"""

from __future__ import annotations

from stoker.cluster.kubernetes.cluster_run import ClusterRun
from stoker.cluster.kubernetes.gangs import gang_parts, hypernodes
from stoker.cluster.kubernetes.jobset import jobset_spec
from stoker.cluster.kubernetes.manifest_fields import Manifest, manifest, without_empty
from stoker.cluster.kubernetes.pod_template import CONTAINER

API = "trainer.kubeflow.org/v1alpha1"
TRAINER = {
    "trainer.kubeflow.org/trainjob-ancestor-step": "trainer"
}  # by which the trainer finds the job with the nodes
VOLCANO_QUEUE = "scheduling.volcano.sh/queue-name"
WAIT = 120  # seconds between the first pod and the last, after which Coscheduling gives up


def training_runtime(run: ClusterRun) -> Manifest:
    """Returns the runtime."""
    queue = run.block.queue if run.gang == "volcano" else None
    template = without_empty(
        metadata=without_empty(annotations=without_empty(**{VOLCANO_QUEUE: queue})),
        spec={**without_empty(ttlSecondsAfterFinished=run.block.ttl), **jobset_spec(run, TRAINER)},
    )
    spec = without_empty(mlPolicy={"numNodes": run.nodes}, podGroupPolicy=_gang(run), template=template)
    return manifest(run, API, "TrainingRuntime", spec=spec)


def trainjob(run: ClusterRun) -> Manifest:
    """Returns the TrainJob."""
    gang = gang_parts(run, CONTAINER)
    spec = without_empty(
        suspend=gang.suspend,
        runtimeRef={"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": run.name},
        trainer={"numNodes": run.nodes},
        activeDeadlineSeconds=run.block.time_limit,
    )
    return manifest(run, API, "TrainJob", labels=gang.labels, spec=spec)


def _gang(run: ClusterRun) -> Manifest | None:
    """Returns the policy by which the trainer makes the pod group itself."""
    if run.gang == "volcano":
        return {"volcano": without_empty(networkTopology=hypernodes(run))}
    return {"coscheduling": {"scheduleTimeoutSeconds": WAIT}} if run.gang == "coscheduling" else None
