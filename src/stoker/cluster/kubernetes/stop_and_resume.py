"""Stops a run so that it can be resumed: by the field, the command or the queue of its kind and its gang scheduler."""

from __future__ import annotations

from stoker.cluster.kubernetes.cluster_api import ClusterApi
from stoker.cluster.kubernetes.manifest_fields import Manifest
from stoker.cluster.kubernetes.workload_states import workload_state
from stoker.errors import Problem, UserError
from stoker.job.targets.kubernetes import KubernetesBlock, gang_of

KUEUE_VERSIONS = ("kueue.x-k8s.io/v1beta2", "kueue.x-k8s.io/v1beta1")
VOLCANO_COMMANDS = "bus.volcano.sh/v1alpha1"


def stop_workload(api: ClusterApi, block: KubernetesBlock, workload: Manifest) -> None:
    """Ends the pods of a workload, which stays."""
    if gang_of(block) == "kueue":
        _set_active(api, workload, active=False)
    elif block.kind == "volcano":
        _command(api, workload, "AbortJob")
    else:
        _suspend(api, workload, suspended=True)


def start_again(api: ClusterApi, block: KubernetesBlock, workload: Manifest) -> bool:
    """Starts the pods of a stopped workload; False if it has ended, and cannot be started."""
    if not was_stopped(api, block, workload):
        known = workload_state(workload, stopped=False)
        return known is None or known[0] == "waiting"  # it is at work
    if gang_of(block) == "kueue":
        _set_active(api, workload, active=True)
    elif block.kind == "volcano":
        _command(api, workload, "ResumeJob")
    else:
        _suspend(api, workload, suspended=False)
    return True


def was_stopped(api: ClusterApi, block: KubernetesBlock, workload: Manifest) -> bool:
    """Returns whether `stop_workload` has stopped it; a suspended workload of Kueue's may also wait for admission."""
    if gang_of(block) == "kueue":
        queued = _queued(api, workload)
        return queued is not None and queued.get("spec", {}).get("active") is False
    if block.kind == "volcano":
        return workload.get("status", {}).get("state", {}).get("phase") in ("Aborted", "Aborting")
    return bool(workload.get("spec", {}).get("suspend"))


def _suspend(api: ClusterApi, workload: Manifest, *, suspended: bool) -> None:
    name = workload["metadata"]["name"]
    api.patch(workload["apiVersion"], workload["kind"], name, {"spec": {"suspend": suspended}})


def _set_active(api: ClusterApi, workload: Manifest, *, active: bool) -> None:
    """Sets the field of Kueue's own object by which it suspends and starts an admitted workload."""
    queued = _queued(api, workload)
    if queued is None:
        message = f"Kueue has no workload of {workload['metadata']['name']}"
        raise UserError(Problem(message, "is Kueue installed, with this kind among its integrations?"))
    api.patch(queued["apiVersion"], "Workload", queued["metadata"]["name"], {"spec": {"active": active}})


def _queued(api: ClusterApi, workload: Manifest) -> Manifest | None:
    """Kueue's object of a workload."""
    uid = workload["metadata"]["uid"]
    for version in KUEUE_VERSIONS:
        for queued in api.select(version, "Workload"):
            owners = queued["metadata"].get("ownerReferences", [])
            if any(owner.get("uid") == uid for owner in owners):
                return {**queued, "apiVersion": version}
    return None


def _command(api: ClusterApi, workload: Manifest, action: str) -> None:
    """An order to Volcano, which carries it out once."""
    target = {
        "apiVersion": workload["apiVersion"],
        "kind": workload["kind"],
        "name": workload["metadata"]["name"],
        "uid": workload["metadata"]["uid"],
        "controller": True,
    }
    api.create(
        {
            "apiVersion": VOLCANO_COMMANDS,
            "kind": "Command",
            "metadata": {
                "generateName": f"{workload['metadata']['name']}-{action.lower()}-",
                "ownerReferences": [target],
            },
            "action": action,
            "target": target,
        }
    )
