"""The headless service that gives the pods of a Job stable names; the other kinds create their own."""

from __future__ import annotations

from stoker.cluster.kubernetes.cluster_run import ClusterRun
from stoker.cluster.kubernetes.manifest_fields import INSTANCE, Manifest, metadata


def service(run: ClusterRun) -> Manifest:
    """Returns the service. It lists pods before they are ready, as they become ready only after finding each other."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(run),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {INSTANCE: run.name},
            "ports": [{"name": "rendezvous", "port": run.port}],
        },
    }
