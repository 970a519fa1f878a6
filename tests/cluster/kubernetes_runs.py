"""Runs for the tests of manifests: a block, and settings that fill it."""

from __future__ import annotations

from typing import Any

from stoker.cluster.kubernetes.cluster_run import ClusterRun
from stoker.job.targets.kubernetes import KubernetesBlock

IMAGE = "registry.example.org/stoker:1"
JOB = "task: sft\nmodel: smollm2-135m\ndata: /data/train.jsonl\nsteps: 200\n"
# A setting of every key that has no effect on the kind or the gang.
FULL: dict[str, Any] = {
    "image_pull": "IfNotPresent",
    "image_pull_secrets": ["registry"],
    "namespace": "training",
    "priority": "high",
    "resources": {"example.com/licence": 1},
    "rdma": {"network": "roce", "hca": "mlx5", "traffic_class": 106},
    "interface": "eth0",
    "cpu": 32,
    "memory": "256Gi",
    "shared_memory": "64Gi",
    "host_network": True,
    "networks": ["rdma-a", "rdma-b"],
    "service_account": "trainer",
    "user": 1000,
    "group": 1000,
    "node_selector": {"gpu": "h100"},
    "tolerations": [
        {"key": "gpu", "effect": "NoSchedule"},
        {"value": "y", "key": "x", "effect": "NoExecute", "seconds": 3},
    ],
    "topology": "topology.kubernetes.io/zone",
    "volumes": [
        {"claim": "runs", "at": "/work"},
        {"host_path": "/mnt/nvme", "at": "/nvme", "read_only": True},
        {"nfs": "nfs.example.org:/models", "at": "/models", "read_only": True},
        {"config_map": "settings", "at": "/settings", "sub_path": "stoker"},
        {"secret": "certificates", "at": "/certificates"},
        {"empty": "500Gi", "at": "/scratch"},
        {"empty": "unlimited", "at": "/more"},
    ],
    "environment": {"NCCL_DEBUG": "INFO"},
    "secrets": {"HF_TOKEN": "hub/token"},
    "setup": ["ulimit -l unlimited"],
    "retries": 5,
    "ttl": 604800,
    "labels": {"team": "speech"},
    "annotations": {"example.com/owner": "me"},
    "fluid": {
        "mounts": [
            {
                "url": "s3://bucket/folder",
                "options": {"alluxio.underfs.s3.region": "eu-west-1"},
                "secrets": {"aws.accessKeyId": "s3-keys/id", "aws.secretKey": "s3-keys/key"},
            }
        ],
        "at": "/data",
    },
}
CLAIMED: dict[str, Any] = {
    "device_class": "gpu.nvidia.com",
    "rdma": {"device_class": "rdma.example.com", "count": 2},
    "alignment": "pcie",
}


def block_of(**keys: Any) -> KubernetesBlock:
    """A block with an image and these keys."""
    return KubernetesBlock.model_validate({"image": IMAGE, **keys})


def run_of(*, nodes: int = 2, least: int | None = None, archive: bytes | None = None, **keys: Any) -> ClusterRun:
    """A run with a block of these keys, on nodes with two processes."""
    block = block_of(**keys)
    return ClusterRun(
        name="tiny",
        on="",
        nodes=nodes,
        least=least or nodes,
        devices=2,
        port=15123,
        output="/work/runs/tiny",
        overrides=("output=/work/runs/tiny",),
        deadline=60,
        requeue=143,
        code=False,
        fingerprint="0123456789abcdef" * 4,
        base="laptop:/home/me/tiny",
        block=block,
        environment=dict(block.environment),
        job=JOB,
        archive=archive,
    )
