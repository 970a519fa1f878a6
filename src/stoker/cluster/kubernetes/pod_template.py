"""The pod of a node: one container that runs one supervisor."""

from __future__ import annotations

from stoker.cluster.kubernetes.cluster_run import ClusterRun
from stoker.cluster.kubernetes.device_claims import CLAIM, claims, pod_claims
from stoker.cluster.kubernetes.gangs import gang_parts
from stoker.cluster.kubernetes.manifest_fields import FINGERPRINT, Manifest, literal, run_labels, without_empty
from stoker.cluster.kubernetes.node_script import WORK, node_script, unpacking
from stoker.cluster.kubernetes.pod_environment import pod_environment
from stoker.cluster.kubernetes.pod_placement import placement_annotations, pod_affinity, pod_tolerations
from stoker.cluster.kubernetes.pod_resources import pod_resources
from stoker.cluster.kubernetes.pod_volumes import pod_volumes

CONTAINER = "node"
RAY_POD_END = "stoker.cluster.kubernetes.ray_pod_end"


def pod_template(run: ClusterRun, *, group: str = CONTAINER, head: Manifest | None = None) -> Manifest:
    """Returns the template of a pod.

    Args:
        group: name of the pods' task group, and of the container.
        head: resources of a pod that trains nothing, instead of a node's.
    """
    block = run.block
    gang = gang_parts(run, group)
    pairs = pod_volumes(run)
    resources = without_empty(**pod_resources(run), claims=[{"name": CLAIM}] if claims(run) else None)
    own_command = run.kind != "rayjob"  # KubeRay writes the command of its pods
    container = without_empty(
        name=group,
        image=block.image,
        imagePullPolicy=block.image_pull,
        command=["/bin/sh", "-c"] if own_command else None,
        args=[literal(node_script(run))] if own_command else None,
        workingDir=None if own_command else WORK,
        env=pod_environment(run),
        ports=[{"name": "rendezvous", "containerPort": run.port}] if own_command else None,
        resources=resources if head is None else head,
        securityContext=container_security(run),
        lifecycle=None if own_command else {"preStop": {"exec": {"command": [block.python, "-m", RAY_POD_END]}}},
        volumeMounts=[mount for _, mount in pairs],
    )
    spec = without_empty(
        restartPolicy="Never" if own_command else None,
        schedulerName=gang.scheduler,
        schedulingGroup=gang.scheduling_group,
        priorityClassName=block.priority,
        subdomain=run.name if run.kind == "job" else None,
        terminationGracePeriodSeconds=run.grace,
        hostNetwork=block.host_network or None,
        dnsPolicy="ClusterFirstWithHostNet" if block.host_network else None,
        serviceAccountName=block.service_account,
        automountServiceAccountToken=False if block.service_account is None else None,
        enableServiceLinks=False,
        imagePullSecrets=[{"name": name} for name in block.image_pull_secrets],
        securityContext=without_empty(
            runAsUser=block.user,
            fsGroup=block.group,
            fsGroupChangePolicy="OnRootMismatch" if block.group is not None else None,
        ),
        nodeSelector=dict(block.node_selector),
        tolerations=pod_tolerations(block.tolerations),
        affinity=pod_affinity(run),
        resourceClaims=pod_claims(run) if head is None else None,
        initContainers=[_unpacking(run)] if not own_command and run.archive is not None else None,
        containers=[container],
        volumes=[volume for volume, _ in pairs],
    )
    annotations = {
        FINGERPRINT: run.fingerprint,
        **placement_annotations(run),
        **gang.pod_annotations,
        **block.annotations,
    }
    return {
        "metadata": {"labels": {**run_labels(run), **gang.pod_labels}, "annotations": annotations},
        "spec": spec,
    }


def _unpacking(run: ClusterRun) -> Manifest:
    """Returns an init container that unpacks the sent archive, for containers whose command is not Stoker's own."""
    work = ("job", "work")
    return without_empty(
        name="unpack",
        image=run.block.image,
        imagePullPolicy=run.block.image_pull,
        command=["/bin/sh", "-c"],
        args=[literal(unpacking(run))],
        workingDir=WORK,
        volumeMounts=[mount for _, mount in pod_volumes(run) if mount["name"] in work],
    )


def container_security(run: ClusterRun) -> Manifest | None:
    """Rights of the container beyond the runtime's own: to lock all memory, which RDMA registers."""
    wanted = run.block.rdma is not None if run.block.memlock == "auto" else run.block.memlock
    return {"capabilities": {"add": ["IPC_LOCK"]}} if wanted else None
