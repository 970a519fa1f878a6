"""The Fluid dataset (data.fluid.io/v1alpha1, Fluid 1.0): the data's location, its cache runtime, and preloading.

Fluid makes a persistent volume claim of the dataset's name, which the pods mount.
"""

from __future__ import annotations

from stoker.cluster.kubernetes.cluster_run import ClusterRun
from stoker.cluster.kubernetes.manifest_fields import Manifest, manifest, without_empty
from stoker.cluster.kubernetes.pod_volumes import dataset_name
from stoker.job.targets.kubernetes_parts import FluidBlock, FluidMountBlock

API = "data.fluid.io/v1alpha1"
RUNTIMES = {"alluxio": "AlluxioRuntime", "juicefs": "JuiceFSRuntime"}
HIGH, LOW = "0.95", "0.7"  # fill of the cache from which it evicts, and down to which


def fluid_objects(run: ClusterRun) -> list[Manifest]:
    """Returns dataset, runtime and data load, in order of creation; empty if the block has no dataset."""
    fluid = run.block.fluid
    if fluid is None:
        return []
    name = dataset_name(run)
    objects = [
        manifest(run, API, "Dataset", name=name, spec=_dataset(fluid)),
        manifest(run, API, RUNTIMES[fluid.runtime], name=name, spec=_cache(run, fluid)),
    ]
    if fluid.preload:
        spec = {"dataset": {"name": name, "namespace": run.block.namespace}, "loadMetadata": True}
        objects.append(manifest(run, API, "DataLoad", name=name, spec=spec))
    return objects


def _dataset(fluid: FluidBlock) -> Manifest:
    mode = "ReadOnlyMany" if fluid.read_only else "ReadWriteMany"
    return {"accessModes": [mode], "mounts": [_mount(mount, fluid) for mount in fluid.mounts]}


def _mount(mount: FluidMountBlock, fluid: FluidBlock) -> Manifest:
    secrets = []
    for option, reference in mount.secrets.items():
        secret, _, key = reference.partition("/")
        secrets.append({"name": option, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}})
    return without_empty(
        name=mount.name,
        mountPoint=mount.url,
        readOnly=fluid.read_only or None,
        options=dict(mount.options),
        encryptOptions=secrets,
    )


def _cache(run: ClusterRun, fluid: FluidBlock) -> Manifest:
    level = {"mediumtype": fluid.medium, "path": fluid.path, "quota": fluid.quota, "high": HIGH, "low": LOW}
    replicas = run.nodes if fluid.replicas == "auto" else fluid.replicas
    return {"replicas": replicas, "tieredstore": {"levels": [level]}}
