"""The headless service that gives the pods of a Job stable names; the other kinds create their own."""

from __future__ import annotations

from stoker.cluster.kubernetes.cluster_run import ClusterRun
from stoker.cluster.kubernetes.manifest_fields import INSTANCE, Manifest, metadata


def service(run: ClusterRun) -> Manifest:
    """The service. Pods are found before they are ready: they are ready only once they have found each other."""
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
