"""The headless service that gives the pods of a Job stable names; the other kinds create their own."""

from __future__ import annotations

from stoker.cluster.kubernetes.cluster_run import ClusterRun
from stoker.cluster.kubernetes.manifest_fields import INSTANCE, Manifest, manifest


def service(run: ClusterRun) -> Manifest:
    """Returns the service. It lists pods before they are ready, as they become ready only after finding each other."""
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": {INSTANCE: run.name},
        "ports": [{"name": "rendezvous", "port": run.port}],
    }
    return manifest(run, "v1", "Service", spec=spec)
