"""Orders by which a run stops and goes on: the field of its kind, Volcano's Command, Kueue's workload.

Volcano's definition of Command is not at hand; what it has in common with Kubernetes' own kinds is checked strictly.
"""

from __future__ import annotations

from typing import Any

import pytest
from kubernetes_runs import block_of
from manifest_schemas import problems_of

from stoker.cluster.kubernetes.stop_and_resume import start_again, stop_workload, was_stopped
from stoker.errors import UserError

JOB = {"apiVersion": "batch.volcano.sh/v1alpha1", "kind": "Job", "metadata": {"name": "tiny", "uid": "u-1"}}


class Api:
    """A cluster that keeps what it is asked to change."""

    def __init__(self, *workloads: dict[str, Any]) -> None:
        self.workloads = workloads
        self.created: list[dict[str, Any]] = []
        self.patched: list[tuple[Any, ...]] = []

    def create(self, manifest: dict[str, Any]) -> dict[str, Any]:
        self.created.append(manifest)
        return manifest

    def patch(self, *given: Any) -> None:
        self.patched.append(given)

    def select(self, version: str, kind: str) -> list[dict[str, Any]]:
        return [each for each in self.workloads if kind == "Workload" and version == each["apiVersion"]]


def volcano(phase: str) -> dict[str, Any]:
    return {**JOB, "status": {"state": {"phase": phase}}}


def test_volcano_is_given_a_command_once() -> None:
    api, block = Api(), block_of(kind="volcano")
    stop_workload(api, block, volcano("Running"))  # type: ignore[arg-type]
    assert start_again(api, block, volcano("Aborted"))  # type: ignore[arg-type]
    assert [command["action"] for command in api.created] == ["AbortJob", "ResumeJob"] and not api.patched
    names = {command["metadata"]["generateName"] for command in api.created}
    assert names == {"tiny-abortjob-", "tiny-resumejob-"}
    for command in api.created:
        assert command.keys() == {"apiVersion", "kind", "metadata", "action", "target"}
        assert (command["apiVersion"], command["kind"]) == ("bus.volcano.sh/v1alpha1", "Command")
        assert command["target"] == {
            "apiVersion": "batch.volcano.sh/v1alpha1",
            "kind": "Job",
            "name": "tiny",
            "uid": "u-1",
            "controller": True,
        }
        metadata = {**command["metadata"], "ownerReferences": [command["target"]]}
        for own in (command["metadata"], metadata):  # an owner, so that it goes with the job
            assert not problems_of({"apiVersion": "v1", "kind": "ConfigMap", "metadata": own})


@pytest.mark.parametrize(
    ("phase", "stopped", "goes_on"),
    [
        ("Aborted", True, True),
        ("Aborting", True, True),
        ("Running", False, True),
        ("Pending", False, True),
        ("Completed", False, False),
        ("Failed", False, False),
    ],
)
def test_a_volcano_job_is_resumed_where_it_was_stopped(phase: str, stopped: bool, goes_on: bool) -> None:
    api, block = Api(), block_of(kind="volcano")
    assert was_stopped(api, block, volcano(phase)) == stopped  # type: ignore[arg-type]
    assert start_again(api, block, volcano(phase)) == goes_on  # type: ignore[arg-type]
    assert len(api.created) == stopped


def test_kueue_is_asked_by_its_own_object_and_other_kinds_by_their_field() -> None:
    owned = {"ownerReferences": [{"uid": "u-1"}], "name": "job-tiny"}
    api = Api({"apiVersion": "kueue.x-k8s.io/v1beta1", "metadata": owned, "spec": {"active": False}})
    queued = block_of(gang="kueue", queue="research")
    stop_workload(api, queued, JOB)  # type: ignore[arg-type]
    assert start_again(api, queued, JOB)  # type: ignore[arg-type]
    fields = [given[3]["spec"] for given in api.patched]
    assert fields == [{"active": False}, {"active": True}]
    with pytest.raises(UserError, match="Kueue has no workload of tiny"):
        stop_workload(Api(), queued, JOB)  # type: ignore[arg-type]
    for kind in ("job", "jobset", "trainjob", "rayjob"):
        api = Api()
        stop_workload(api, block_of(kind=kind), JOB)  # type: ignore[arg-type]
        assert [given[3] for given in api.patched] == [{"spec": {"suspend": True}}] and not api.created
