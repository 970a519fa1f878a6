"""Volumes of the pods and their mount paths: the sent files, shared memory, the user's own, a Fluid dataset."""

from __future__ import annotations

from stoker.cluster.kubernetes.cluster_run import ClusterRun
from stoker.cluster.kubernetes.manifest_fields import Manifest, Present, without_empty
from stoker.cluster.kubernetes.node_script import GIVEN, SECRET_FOLDER, WORK
from stoker.cluster.kubernetes.sent_archive import part_map, parts_of
from stoker.job.targets.kubernetes_parts import VolumeBlock

SSH_FOLDER = "/root/.ssh"
OWNER_ONLY = 0o400


def secret_name(run: ClusterRun) -> str:
    """Returns the secret of the supervisors' channel."""
    return f"{run.name}-channel"


def dataset_name(run: ClusterRun) -> str:
    """Returns the Fluid dataset, and the claim of the same name that Fluid makes for it."""
    return f"{run.name}-data"


def pod_volumes(run: ClusterRun) -> list[tuple[Manifest, Manifest]]:
    """(volume, mount) pairs."""
    found = [_pair("job", GIVEN, _sent(run), read_only=True)]
    if run.kind != "rayjob":  # the driver of a RayJob draws a secret and hands it to its actors
        found.append(_pair("channel", SECRET_FOLDER, {"secret": {"secretName": secret_name(run)}}, read_only=True))
    found.append(_pair("work", WORK, {"emptyDir": Present()}))
    if run.block.shared_memory != "none":
        size = None if run.block.shared_memory == "auto" else run.block.shared_memory
        found.append(_pair("shared-memory", "/dev/shm", {"emptyDir": without_empty(medium="Memory", sizeLimit=size)}))
    for index, volume in enumerate(run.block.volumes):
        found.append(
            _pair(f"volume-{index}", volume.at, source_of(volume), read_only=volume.read_only, sub_path=volume.sub_path)
        )
    if run.block.fluid is not None:
        source = {"persistentVolumeClaim": {"claimName": dataset_name(run)}}
        found.append(_pair("dataset", run.block.fluid.at, source, read_only=run.block.fluid.read_only))
    if run.block.ssh_secret is not None:
        keys = {"secret": {"secretName": run.block.ssh_secret, "defaultMode": OWNER_ONLY}}
        found.append(_pair("ssh", SSH_FOLDER, keys, read_only=True))
    return found


def _sent(run: ClusterRun) -> Manifest:
    """Returns the config maps in one folder."""
    parts = len(parts_of(run))
    if parts < 2:
        return {"configMap": {"name": run.name}}
    names = [run.name, *(part_map(run.name, index) for index in range(parts))]
    return {"projected": {"sources": [{"configMap": {"name": name}} for name in names]}}


def source_of(volume: VolumeBlock) -> Manifest:
    """Returns the volume's source; exactly one is given."""
    if volume.claim is not None:
        return {"persistentVolumeClaim": without_empty(claimName=volume.claim, readOnly=volume.read_only or None)}
    if volume.host_path is not None:
        return {"hostPath": {"path": volume.host_path}}
    if volume.config_map is not None:
        return {"configMap": {"name": volume.config_map}}
    if volume.secret is not None:
        return {"secret": {"secretName": volume.secret}}
    if volume.nfs is not None:
        server, _, path = volume.nfs.partition(":")
        return {"nfs": without_empty(server=server, path=path, readOnly=volume.read_only or None)}
    size = volume.empty if volume.empty != "unlimited" else None
    return {"emptyDir": Present(without_empty(sizeLimit=size))}


def _pair(
    name: str, at: str, source: Manifest, *, read_only: bool = False, sub_path: str | None = None
) -> tuple[Manifest, Manifest]:
    return {"name": name, **source}, without_empty(
        name=name, mountPath=at, subPath=sub_path, readOnly=read_only or None
    )
