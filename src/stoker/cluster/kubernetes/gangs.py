"""Gang scheduling, all pods or none: each scheduler's fields of the pods and the workload, and its own objects.

Fields, at these versions: Volcano 1.16 (scheduling.volcano.sh/v1beta1), Kueue 0.20 (labels and annotations of
kueue.x-k8s.io), Coscheduling of scheduler-plugins 0.35 (scheduling.x-k8s.io/v1alpha1), Koordinator 1.8
(scheduling.sigs.k8s.io/v1alpha1), YuniKorn 1.9 (annotations), Kubernetes 1.37 (scheduling.k8s.io/v1beta1).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field

from stoker.cluster.kubernetes.cluster_run import ClusterRun
from stoker.cluster.kubernetes.manifest_fields import INSTANCE, Manifest, manifest, multiply_quantity, without_empty
from stoker.cluster.kubernetes.pod_placement import pod_affinity, pod_tolerations
from stoker.cluster.kubernetes.pod_resources import resource_amounts

HEAD = "head"  # the group of a RayJob's head pod
HEAD_AMOUNTS: dict[str, int | str] = {"cpu": 2, "memory": "8Gi"}


@dataclass(frozen=True)
class GangParts:
    """The fields that a gang scheduler adds.

    Attributes:
        scheduler: name of the pods' scheduler; None for the cluster's own.
        pod_labels, pod_annotations: of the pods.
        scheduling_group: of the pods, for the native pod groups.
        labels: of the workload.
        suspend: whether the workload is created suspended, for the scheduler to start it.
    """

    scheduler: str | None = None
    pod_labels: dict[str, str] = field(default_factory=dict)
    pod_annotations: dict[str, str] = field(default_factory=dict)
    scheduling_group: Manifest | None = None
    labels: dict[str, str] = field(default_factory=dict)
    suspend: bool | None = None


def gang_parts(run: ClusterRun, group: str) -> GangParts:
    """Returns the fields that the run's gang scheduler adds to a group's pods and to the workload."""
    parts = PARTS[run.gang](run, group)
    if run.block.scheduler is None:
        return parts
    return GangParts(**{**vars(parts), "scheduler": run.block.scheduler})


def pod_group(run: ClusterRun) -> Manifest | None:
    """Returns the pod group, which gives the gang's size; None if no such object is needed.

    Volcano creates it from its own Job, the Kubeflow trainer from its TrainJobs.
    """
    made = run.kind == "volcano" or (run.kind == "trainjob" and run.gang in ("volcano", "coscheduling"))
    if made or run.gang not in PODGROUPS:
        return None
    version, spec = PODGROUPS[run.gang]
    return manifest(run, version, "PodGroup", spec=spec(run))


def gang_size(run: ClusterRun) -> int:
    """Returns the number of pods that must start together: the minimum of nodes, and a RayJob's head."""
    return run.least + (run.kind == "rayjob")


def least_resources(run: ClusterRun) -> dict[str, int | str]:
    """Returns the total resources of these pods."""
    found: dict[str, int | str] = {
        name: multiply_quantity(amount, run.least) for name, amount in resource_amounts(run).items()
    }
    return found if run.kind != "rayjob" else {}  # the sum with the head's is left to the scheduler


def _volcano(run: ClusterRun, group: str) -> GangParts:
    own = run.kind in ("volcano", "trainjob")  # their controllers set the group's name
    annotations = {} if own else {"scheduling.k8s.io/group-name": run.name}
    return GangParts("volcano", pod_annotations=annotations)


def _kueue(run: ClusterRun, group: str) -> GangParts:
    topology = run.block.topology
    key = f"kueue.x-k8s.io/podset-{run.block.topology_mode}-topology"
    return GangParts(
        pod_annotations={key: topology} if topology is not None else {},
        labels=without_empty(
            **{
                "kueue.x-k8s.io/queue-name": run.block.queue,
                "kueue.x-k8s.io/priority-class": run.block.workload_priority,
            }
        ),
        suspend=True,
    )


def _coscheduling(run: ClusterRun, group: str) -> GangParts:
    own = run.kind == "trainjob"
    labels = {} if own else {"scheduling.x-k8s.io/pod-group": run.name}
    return GangParts("scheduler-plugins-scheduler", pod_labels=labels)


def _koordinator(run: ClusterRun, group: str) -> GangParts:
    labels = {"pod-group.scheduling.sigs.k8s.io": run.name, "quota.scheduling.koordinator.sh/name": run.block.queue}
    return GangParts("koord-scheduler", pod_labels=without_empty(**labels))


def _yunikorn(run: ClusterRun, group: str) -> GangParts:
    groups = [_task_group(run, HEAD, 1)] if run.kind == "rayjob" else []
    groups.append(_task_group(run, "node", run.least))
    annotations = {
        "yunikorn.apache.org/task-group-name": group,
        "yunikorn.apache.org/task-groups": json.dumps(groups, indent=2) + "\n",
        "yunikorn.apache.org/schedulingPolicyParameters": "gangSchedulingStyle=Hard",
    }
    labels = {"yunikorn.apache.org/app-id": run.name, "yunikorn.apache.org/queue": run.block.queue}
    return GangParts("yunikorn", pod_labels=without_empty(**labels), pod_annotations=annotations)


def _task_group(run: ClusterRun, name: str, count: int) -> Manifest:
    """Returns a copy of the pods' requests, with which YuniKorn reserves their place by pods that only wait."""
    return without_empty(
        name=name,
        minMember=count,
        labels={INSTANCE: run.name},  # the affinity selects it
        minResource={
            key: str(value) for key, value in (HEAD_AMOUNTS if name == HEAD else resource_amounts(run)).items()
        },
        nodeSelector=dict(run.block.node_selector),
        tolerations=pod_tolerations(run.block.tolerations),
        affinity=pod_affinity(run),
    )


def _least(run: ClusterRun) -> Manifest:
    return without_empty(minMember=gang_size(run), minResources=least_resources(run))


def _volcano_spec(run: ClusterRun) -> Manifest:
    more = without_empty(queue=run.block.queue, priorityClassName=run.block.priority, networkTopology=hypernodes(run))
    return {**_least(run), **more}


def hypernodes(run: ClusterRun) -> Manifest | None:
    """Returns Volcano's limit on the network distance between pods."""
    if run.block.topology_tier is None:
        return None
    mode = "hard" if run.block.topology_mode == "required" else "soft"
    return {"mode": mode, "highestTierAllowed": run.block.topology_tier}


def _native_spec(run: ClusterRun) -> Manifest:
    topology = run.block.topology
    return without_empty(
        schedulingPolicy={"gang": {"minCount": gang_size(run)}},
        schedulingConstraints={"topology": [{"key": topology}]} if topology is not None else None,
        priorityClassName=run.block.priority,
    )


PARTS: dict[str, Callable[[ClusterRun, str], GangParts]] = {
    "none": lambda run, group: GangParts(),
    "volcano": _volcano,
    "kueue": _kueue,
    "coscheduling": _coscheduling,
    "koordinator": _koordinator,
    "yunikorn": _yunikorn,
    "native": lambda run, group: GangParts(scheduling_group={"podGroupName": run.name}),
}
PODGROUPS: dict[str, tuple[str, Callable[[ClusterRun], Manifest]]] = {  # by gang scheduler: API version, and spec
    "volcano": ("scheduling.volcano.sh/v1beta1", _volcano_spec),
    "coscheduling": ("scheduling.x-k8s.io/v1alpha1", _least),
    "koordinator": ("scheduling.sigs.k8s.io/v1alpha1", _least),
    "native": ("scheduling.k8s.io/v1beta1", _native_spec),
}
