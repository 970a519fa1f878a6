"""The state of a workload, from its own status: one function a kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from stoker.cluster.target import State

Object = Mapping[str, Any]
Known = tuple[State, str]  # with the controller's reason


def workload_state(workload: Object, *, stopped: bool) -> Known | None:
    """Returns the state if the object's status has it; None if only its pods do.

    Args:
        stopped: whether a suspended workload was stopped by the user; else it waits for admission.
    """
    return STATES[workload["kind"] if "volcano" not in workload["apiVersion"] else "VolcanoJob"](workload, stopped)


def _by_conditions(workload: Object, stopped: bool) -> Known | None:
    """Job, JobSet and TrainJob."""
    conditions = {c["type"]: c for c in workload.get("status", {}).get("conditions", []) if c.get("status") == "True"}
    for kind in ("Complete", "Completed"):
        if kind in conditions:
            return "done", ""
    if "Failed" in conditions:
        condition = conditions["Failed"]
        return "failed", f"{condition.get('reason', '')}: {condition.get('message', '')}".strip(": ")
    if workload.get("spec", {}).get("suspend"):
        return ("stopped", "") if stopped else ("waiting", "the queue has not admitted it")
    return None


def _volcano(workload: Object, stopped: bool) -> Known | None:
    state = workload.get("status", {}).get("state", {})
    why = f"{state.get('reason', '')}: {state.get('message', '')}".strip(": ")
    phase = state.get("phase", "")
    found: dict[str, State] = {
        "Completed": "done", "Completing": "running", "Failed": "failed", "Terminated": "failed",
        "Terminating": "failed", "Aborted": "stopped", "Aborting": "stopped",
    }  # fmt: skip
    return (found[phase], why if found[phase] == "failed" else "") if phase in found else None


def _ray(workload: Object, stopped: bool) -> Known | None:
    status = workload.get("status", {})
    deployment, job = status.get("jobDeploymentStatus", ""), status.get("jobStatus", "")
    why = f"{status.get('reason', '')}: {status.get('message', '')}".strip(": ")
    if deployment == "Failed" or job == "FAILED":
        return "failed", why
    if job == "SUCCEEDED":
        return "done", ""
    if job == "STOPPED":
        return "stopped", ""
    if deployment in ("Suspended", "Suspending") or (not deployment and workload.get("spec", {}).get("suspend")):
        return ("stopped", "") if stopped else ("waiting", "the queue has not admitted it")
    return None


STATES: dict[str, Callable[[Object, bool], Known | None]] = {
    "Job": _by_conditions,
    "JobSet": _by_conditions,
    "TrainJob": _by_conditions,
    "VolcanoJob": _volcano,
    "RayJob": _ray,
}
