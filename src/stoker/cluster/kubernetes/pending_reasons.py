"""The reason why a pod does not run, from its conditions, its containers, its events and those of its workload.

The scheduler's message is, for example: ``0/4 nodes are available: 1 node(s) had untolerated taint {gpu: true}, 3
Insufficient nvidia.com/gpu. preemption: ...`` (kube-scheduler, framework/types.go, FitError).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Object = Mapping[str, Any]

_NODES = re.compile(r"^(\d+)/(\d+) nodes are available:? ?(.*)$", re.DOTALL)
_COUNTED = re.compile(r"^(\d+) (.*)$")
_INSUFFICIENT = re.compile(r"^Insufficient (\S+)$")
_TAINT = re.compile(r"had untolerated taint\(?s?\)? ?\{?([^}]*)\}?")
_QUOTA = re.compile(r"exceeded quota: ([^,]+), requested: (\S+), used: (\S+), limited: (\S+)")
# Messages of the scheduler's plugins about nodes, shortened.
PHRASES = (
    ("didn't match Pod's node affinity/selector", "have not the labels of `node_selector`"),
    ("didn't match pod affinity rules", "are not in the topology domain of the other pods"),
    ("didn't match pod anti-affinity rules", "hold a pod of this run already (`one_per_host`)"),
    ("didn't have free ports", "have the port taken, by another run on the host's network"),
    ("unschedulable", "are cordoned"),
    ("had volume node affinity conflict", "cannot reach the volume"),
    ("cannot allocate all claims", "have not the devices that are claimed together"),
)
IMAGE_REASONS = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError")


def reasons(pod: Object, events: Sequence[Object]) -> list[str]:
    """Returns why the pod does not run yet; empty for one that runs or has ended.

    Args:
        events: of the pod.
    """
    if pod.get("status", {}).get("phase") not in (None, "Pending"):
        return []
    found = [*_scheduling(pod), *_containers(pod), *_mounts(events)]
    return list(dict.fromkeys(found))


def workload_reasons(events: Sequence[Object]) -> list[str]:
    """Returns why a workload has no pods: its controller could not create them."""
    found = []
    for event in events:
        message = event.get("message", "")
        if event.get("type") == "Warning" and event.get("reason") in ("FailedCreate", "FailedCreatePod"):
            found.append(quota(message) or f"pods cannot be created: {message}")
    return list(dict.fromkeys(found))


def group_reasons(group: Object) -> list[str]:
    """Returns why a pod group, a Kueue workload or a Volcano Job waits: messages of its unmet conditions."""
    found = []
    for condition in group.get("status", {}).get("conditions", []):
        kind, status, message = condition.get("type"), condition.get("status"), condition.get("message", "")
        if kind in ("QuotaReserved", "Admitted", "PodGroupScheduled", "Scheduled") and status == "False" and message:
            found.append(f"waits in the queue: {message}")
        elif kind == "Unschedulable" and status == "True" and message:
            found.append(f"the gang waits: {message}")
        elif kind == "Evicted" and status == "True" and message:
            found.append(f"was preempted: {message}")
    return list(dict.fromkeys(found))


def quota(message: str) -> str:
    """Describes the quota that is used up; empty for other messages."""
    match = _QUOTA.search(message)
    if match is None:
        return ""
    name, wanted, used, limit = match.groups()
    return f"the quota {name} is used up: {wanted} more is asked for, {used} is used, {limit} is the limit"


def unschedulable(message: str) -> str:
    """Explains the scheduler's message."""
    match = _NODES.match(message.strip())
    if match is None:
        return message.strip()
    free, nodes, rest = match.groups()
    causes = []
    for part in re.split(r", (?=\d+ )", rest.partition(" preemption:")[0].strip().rstrip(".")):
        counted = _COUNTED.match(part.strip())
        causes.append(_cause(*counted.groups()) if counted is not None else part.strip())
    of = f"none of {nodes} nodes" if free == "0" else f"only {free} of {nodes} nodes"
    return f"{of} will do: {'; '.join(cause for cause in causes if cause)}"


def _cause(count: str, text: str) -> str:
    """Describes one cause, with the number of nodes that it affects."""
    insufficient = _INSUFFICIENT.match(text)
    if insufficient is not None:
        return f"{count} have too little {insufficient[1]} free"
    taint = _TAINT.search(text)
    if taint is not None:
        return f"{count} have the taint {taint[1].strip(' :')} (see `tolerations`)"
    for theirs, ours in PHRASES:
        if theirs in text:
            return f"{count} {ours}"
    return f"{count} {text.removeprefix('node(s) ')}"


def _scheduling(pod: Object) -> Iterator[str]:
    for condition in pod.get("status", {}).get("conditions", []):
        if condition.get("type") != "PodScheduled" or condition.get("status") != "False":
            continue
        message = condition.get("message", "")
        if condition.get("reason") == "SchedulingGated":
            gates = ", ".join(gate["name"] for gate in pod.get("spec", {}).get("schedulingGates", []))
            yield f"waits for admission ({gates or message})"
        elif "unbound" in message and "PersistentVolumeClaim" in message:
            yield f"a volume claim is not bound: {', '.join(claims_of(pod)) or message}"
        elif match := re.search(r'persistentvolumeclaim "([^"]+)" not found', message):
            yield f"there is no volume claim {match[1]}"
        else:
            yield unschedulable(message)


def _containers(pod: Object) -> Iterator[str]:
    status = pod.get("status", {})
    for container in (*status.get("initContainerStatuses", []), *status.get("containerStatuses", [])):
        waiting = container.get("state", {}).get("waiting")
        if waiting is None or waiting.get("reason") in ("ContainerCreating", "PodInitializing", None):
            continue
        reason, message = waiting["reason"], waiting.get("message", "")
        if reason in IMAGE_REASONS:
            yield f"the image {container.get('image', '')} cannot be pulled: {message or reason}"
        else:
            yield f"{reason}: {message}" if message else reason


def _mounts(events: Sequence[Object]) -> Iterator[str]:
    for event in events:
        if event.get("reason") in ("FailedMount", "FailedAttachVolume"):
            yield f"a volume cannot be mounted: {event.get('message', '')}"
        if event.get("reason") in ("FailedCreatePodSandBox", "FailedPreemption", "NetworkNotReady"):
            yield f"{event['reason']}: {event.get('message', '')}"


def claims_of(pod: Object) -> list[str]:
    """Names of the pod's volume claims."""
    volumes = pod.get("spec", {}).get("volumes", [])
    return [v["persistentVolumeClaim"]["claimName"] for v in volumes if "persistentVolumeClaim" in v]
