"""Why pods wait, in words, from what schedulers, kubelets and controllers say."""

from __future__ import annotations

from typing import Any

import pytest

from stoker.cluster.kubernetes.pending_reasons import group_reasons, quota, reasons, unschedulable, workload_reasons


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (
            "0/4 nodes are available: 1 node(s) had untolerated taint {gpu: true}, 3 Insufficient nvidia.com/gpu. "
            "preemption: 0/4 nodes are available: 1 Preemption is not helpful for scheduling, 3 No preemption victims.",
            "none of 4 nodes will do: 1 have the taint gpu: true (see `tolerations`); "
            "3 have too little nvidia.com/gpu free",
        ),
        (
            "0/2 nodes are available: 2 node(s) didn't match Pod's node affinity/selector.",
            "none of 2 nodes will do: 2 have not the labels of `node_selector`",
        ),
        (
            "0/3 nodes are available: 1 Insufficient cpu, 1 node(s) were unschedulable, 1 node(s) had volume "
            "node affinity conflict. preemption: not eligible.",
            "none of 3 nodes will do: 1 have too little cpu free; 1 are cordoned; 1 cannot reach the volume",
        ),
        ("no nodes available to schedule pods", "no nodes available to schedule pods"),
    ],
)  # fmt: skip
def test_the_schedulers_message(message: str, words: str) -> None:
    assert unschedulable(message) == words


def pod(**status: Any) -> dict[str, Any]:
    return {"metadata": {"name": "tiny-0"}, "spec": {"volumes": []}, "status": {"phase": "Pending", **status}}


def test_an_image_that_cannot_be_pulled_is_named() -> None:
    waiting = {"reason": "ImagePullBackOff", "message": "not found"}
    found = reasons(pod(containerStatuses=[{"image": "example.org/x:1", "state": {"waiting": waiting}}]), [])
    assert found == ["the image example.org/x:1 cannot be pulled: not found"]


def test_gates_claims_and_mounts() -> None:
    gated = pod(
        conditions=[{"type": "PodScheduled", "status": "False", "reason": "SchedulingGated", "message": "gated"}]
    )
    gated["spec"]["schedulingGates"] = [{"name": "kueue.x-k8s.io/topology"}]
    assert reasons(gated, []) == ["waits for admission (kueue.x-k8s.io/topology)"]
    message = "0/1 nodes are available: pod has unbound immediate PersistentVolumeClaims."
    unbound = pod(
        conditions=[{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}]
    )
    unbound["spec"]["volumes"] = [{"persistentVolumeClaim": {"claimName": "runs"}}]
    assert reasons(unbound, []) == ["a volume claim is not bound: runs"]
    event = {"reason": "FailedMount", "message": 'secret "hub" not found'}
    assert reasons(pod(), [event]) == ['a volume cannot be mounted: secret "hub" not found']
    assert reasons({**pod(), "status": {"phase": "Running"}}, [event]) == []


def test_quota_and_gangs() -> None:
    message = 'pods "tiny-0" is forbidden: exceeded quota: gpus, requested: requests.nvidia.com/gpu=8, used: requests.nvidia.com/gpu=4, limited: requests.nvidia.com/gpu=8'  # noqa: E501
    words = "the quota gpus is used up: requests.nvidia.com/gpu=8 more is asked for, requests.nvidia.com/gpu=4 is used, requests.nvidia.com/gpu=8 is the limit"  # noqa: E501
    assert quota(message) == words
    assert workload_reasons([{"type": "Warning", "reason": "FailedCreate", "message": message}]) == [words]
    volcano = {
        "status": {
            "conditions": [{"type": "Unschedulable", "status": "True", "message": "3/3 tasks in gang unschedulable"}]
        }
    }
    assert group_reasons(volcano) == ["the gang waits: 3/3 tasks in gang unschedulable"]
    kueue = {"status": {"conditions": [{"type": "QuotaReserved", "status": "False", "message": "insufficient quota"}]}}
    assert group_reasons(kueue) == ["waits in the queue: insufficient quota"]
