"""Submissions to the tests' cluster: its nodes, a job, and a wait for a run's state."""

from __future__ import annotations

import time
from collections.abc import Callable

from stoker.cluster.kubernetes.kubernetes_target import KubernetesTarget
from stoker.cluster.record import Record
from stoker.cluster.submission import Submission

NODES = {"alpha": {"nvidia.com/gpu": 2}, "beta": {"nvidia.com/gpu": 2}}
JOB = """
task: sft
model: smollm2-135m
data: rows.jsonl
steps: 3
output: runs/tiny
parallel: {data: 4}
"""
Submit = Callable[..., tuple[KubernetesTarget, Submission]]


def until(state: str, target: KubernetesTarget, record: Record, seconds: float = 20) -> str:
    """Waits for a state; the reason that comes with it."""
    end = time.monotonic() + seconds
    while (status := target.status(record)).state != state:
        assert time.monotonic() < end, status
        time.sleep(0.05)
    return status.why
