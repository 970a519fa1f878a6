"""The RayJob of KubeRay (ray.io/v1): a Ray cluster with a worker per node, and the driver that trains on it."""

from __future__ import annotations

import json
from dataclasses import asdict

from stoker.cluster.kubernetes.cluster_run import ClusterRun
from stoker.cluster.kubernetes.gangs import HEAD, HEAD_AMOUNTS, gang_parts
from stoker.cluster.kubernetes.manifest_fields import Manifest, manifest, run_labels, without_empty
from stoker.cluster.kubernetes.node_script import DRIVER, GIVEN, JOB
from stoker.cluster.kubernetes.pod_placement import pod_tolerations
from stoker.cluster.kubernetes.pod_template import CONTAINER, pod_template
from stoker.cluster.ray.placement import Placement
from stoker.cluster.submission import nodes_option

SUBMITTER = "ray-job-submitter"  # KubeRay's name of the container that starts the driver and prints its output
SUBMITTER_AMOUNTS = {"cpu": "500m", "memory": "512Mi"}
WAIT = 3600.0  # seconds within which Ray's workers must be there


def rayjob(run: ClusterRun) -> Manifest:
    """Returns the RayJob. The head trains nothing: it has no processors for Ray's actors.

    KubeRay would restart the whole cluster after any exit code, so its retries are off. It replaces lost workers. It
    ends the cluster at the end of the run: with a time to live, it would keep the GPUs for that time.
    """
    gang = gang_parts(run, CONTAINER)
    head_resources: Manifest = {"requests": dict(HEAD_AMOUNTS), "limits": dict(HEAD_AMOUNTS)}
    workers = without_empty(
        groupName=CONTAINER,
        replicas=run.nodes,
        minReplicas=run.least,
        maxReplicas=run.nodes,
        rayStartParams={"num-gpus": f"{_gpus(run)}"},  # Ray itself counts neither fractions of GPUs nor claimed ones
        template=pod_template(run),
    )
    cluster = without_empty(
        rayVersion=run.block.ray_version,
        headGroupSpec={
            "rayStartParams": {"num-cpus": "0", "num-gpus": "0", "dashboard-host": "0.0.0.0"},
            "template": pod_template(run, group=HEAD, head=head_resources),
        },
        workerGroupSpecs=[workers],
    )
    spec = without_empty(
        suspend=gang.suspend,
        entrypoint=f"{run.block.python} -m stoker.cluster.ray.driver {GIVEN}/{DRIVER}",
        submitterPodTemplate=_submitter(run),
        backoffLimit=0,
        shutdownAfterJobFinishes=True,
        activeDeadlineSeconds=run.block.time_limit,
        rayClusterSpec=cluster,
    )
    return manifest(run, "ray.io/v1", "RayJob", labels=gang.labels, spec=spec)


def driver_plan(run: ClusterRun) -> str:
    """Returns the input of `stoker.cluster.ray.driver`: the placement of the supervisors, and their options."""
    words = [f"{GIVEN}/{JOB}", *run.overrides, "--secret", "SECRET", "--nodes", nodes_option(run.least, run.nodes)]
    plan = {
        "name": run.name,
        "placement": asdict(Placement(run.nodes, 1.0, _gpus(run))),
        "words": [*words, "--devices", f"{run.devices}"],
        "folder": run.block.folder,
        "output": run.output,
        "wait": WAIT,
    }
    return json.dumps(plan, indent=2) + "\n"


def _gpus(run: ClusterRun) -> int:
    return run.devices if run.block.gpu != "none" or run.block.device_class is not None else 0


def _submitter(run: ClusterRun) -> Manifest:
    """Returns the pod that starts the driver. KubeRay writes its command."""
    amounts = {"requests": dict(SUBMITTER_AMOUNTS), "limits": dict(SUBMITTER_AMOUNTS)}
    container = without_empty(
        name=SUBMITTER, image=run.block.image, imagePullPolicy=run.block.image_pull, resources=amounts
    )
    secrets = [{"name": name} for name in run.block.image_pull_secrets]
    spec = without_empty(
        restartPolicy="Never",
        serviceAccountName=run.block.service_account,
        imagePullSecrets=secrets,
        nodeSelector=dict(run.block.node_selector),
        tolerations=pod_tolerations(run.block.tolerations),
        containers=[container],
    )
    return {"metadata": {"labels": run_labels(run)}, "spec": spec}
