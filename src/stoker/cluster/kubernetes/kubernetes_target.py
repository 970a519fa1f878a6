"""The Kubernetes target: `stoker submit`, and the verbs on a submitted run."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from itertools import takewhile
from typing import Any

from stoker.cluster.chosen_target import ChosenTarget
from stoker.cluster.environment import variables
from stoker.cluster.kubernetes.block_problems import block_problems, on_a_volume, volume_of
from stoker.cluster.kubernetes.cluster_api import ClusterApi
from stoker.cluster.kubernetes.cluster_run import ClusterRun
from stoker.cluster.kubernetes.gangs import pod_group
from stoker.cluster.kubernetes.manifest_fields import MANAGED_BY, STOKER, Manifest
from stoker.cluster.kubernetes.manifests import manifests, preview, workload
from stoker.cluster.kubernetes.node_script import JOB
from stoker.cluster.kubernetes.pending_reasons import group_reasons, workload_reasons
from stoker.cluster.kubernetes.pod_template import CONTAINER
from stoker.cluster.kubernetes.rayjob import SUBMITTER
from stoker.cluster.kubernetes.run_pods import (
    ending,
    events_of,
    phase_of,
    pod_reasons,
    pods_of,
    read_logs,
)
from stoker.cluster.kubernetes.secret import new_value
from stoker.cluster.kubernetes.sent_archive import LARGEST, MOST, TooLarge, part_map
from stoker.cluster.kubernetes.stop_and_resume import start_again, stop_workload, was_stopped
from stoker.cluster.kubernetes.submitted import run_of_config_maps, run_of_submission
from stoker.cluster.kubernetes.workload_states import workload_state
from stoker.cluster.record import Record
from stoker.cluster.secret_names import is_secret
from stoker.cluster.submission import Submission, path_on_nodes
from stoker.cluster.target import Status
from stoker.errors import Problem, RunFailed, UserError, placed_errors
from stoker.job.targets.kubernetes import KubernetesBlock
from stoker.job.task_spec import TASKS
from stoker.launch.nodes.shared_storage import needs_shared_storage


def open_target(chosen: ChosenTarget) -> KubernetesTarget:
    """Returns the target of a block."""
    return KubernetesTarget(chosen)


class KubernetesTarget:
    """A cluster; it is connected to when it is first asked."""

    def __init__(self, chosen: ChosenTarget) -> None:
        assert isinstance(chosen.block, KubernetesBlock)
        self.chosen, self.block = chosen, chosen.block
        self._run: tuple[Submission, ClusterRun] | None = None

    @cached_property
    def api(self) -> ClusterApi:
        """The cluster's API."""
        with placed_errors(lambda p: self.chosen.problem(p.key, p.message, p.suggestion) if p.key else p):
            return ClusterApi(self.block.kubeconfig, self.block.context, self.block.namespace)

    def host_count(self) -> int | None:
        """None: pods are made, not counted."""
        return None

    def check(self, submission: Submission) -> None:
        """Raises UserError with every problem that can be found before anything is sent."""
        found = [*self._unwritable(submission), *self._would_fail(submission)]
        try:
            self.run_of(submission)
        except UserError as error:
            found += error.problems
        if found:
            raise UserError(*found)

    def preview(self, submission: Submission) -> str:
        """Returns the manifests as YAML documents. Problems that only a submission would have are printed to stderr."""
        if found := self._unwritable(submission):
            raise UserError(*found)
        for problem in self._would_fail(submission):
            print(f"warning: {problem}", file=sys.stderr)
        return preview(self.run_of(submission))

    def _unwritable(self, submission: Submission) -> list[Problem]:
        """Returns problems of the block itself, with which no manifests can or should be written."""
        found = [self.chosen.problem(*problem) for problem in block_problems(self.block)]
        handed = variables(self.block, os.environ)
        forwarded = sorted(handed.keys() - self.block.environment.keys())
        for name in (name for name in forwarded if is_secret(name, handed[name])):
            hint = f"write secrets: {{{name}: SECRET/KEY}}, and leave it out of `forward`"
            found.append(self.chosen.problem("forward", f"the value of {name} could be read in the manifest", hint))
        written = filter(None, (submission.output, *(job.checkpoint.to for job in submission.jobs)))
        for path in (path_on_nodes(each, self.block.folder) for each in written):
            index = volume_of(self.block, path) if "://" not in path else None
            if index is not None and self.block.volumes[index].read_only:
                message = f"the run writes to {path}, and the volume at {self.block.volumes[index].at} is read-only"
                hint = "remove `read_only`, or write `output` or `folder` on another volume"
                found.append(self.chosen.problem(f"volumes[{index}].read_only", message, hint))
                break
        return found

    def _would_fail(self, submission: Submission) -> list[Problem]:
        """Returns reasons for which the cluster would refuse the run, or its pods would fail."""
        found = []
        output = path_on_nodes(submission.output, self.block.folder)
        # A run that resumes reads its answers in its folder.
        answers = any(TASKS[job.task].rows.prompts for job in submission.jobs)
        if any(map(needs_shared_storage, submission.jobs)) and not on_a_volume(self.block, output):
            hint = f"write volumes: [{{claim: NAME, at: {self.block.folder}}}]"
            hint += "" if answers else ", or checkpoint: {to: URL} in the job"
            message = f"the run's folder {output} is on no volume, and would be gone with its pod"
            found.append(self.chosen.problem("volumes" if self.block.volumes else "", message, hint))
        return found

    def submit(self, submission: Submission) -> Record:
        """Creates all objects of the run; none of them if the cluster refuses one.

        The objects of an ended run of that name are deleted first; its folder is kept.
        """
        run = self.run_of(submission)
        made = workload(run)
        earlier = self.api.read(made["apiVersion"], made["kind"], run.name)
        if earlier is not None and earlier["metadata"].get("labels", {}).get(MANAGED_BY) == STOKER:
            known = workload_state(earlier, stopped=True)
            if known is not None and known[0] in ("done", "failed"):
                self._delete(run)
        self._create(run)
        return self._record(run, time.time())

    def status(self, record: Record) -> Status:
        """Returns the run's state; for a waiting one, with the reason."""
        found = self._workload(record)
        if found is None:
            return Status("lost", f"the namespace {self.api.namespace} has no {record.value('kind')} {record.name}")
        known = workload_state(found, stopped=was_stopped(self.api, self.block, found))
        pods = pods_of(self.api, record.name)
        nodes = sorted({pod["spec"]["nodeName"] for pod in pods if pod.get("spec", {}).get("nodeName")})
        if known is not None and known[0] != "waiting":
            return Status(known[0], known[1] or self._ended(pods, known[0]), nodes)
        if known is None and any(phase_of(pod) == "Running" for pod in pods):
            return Status("running", "; ".join(self._waiting(record, found)), nodes)
        return Status("waiting", "; ".join(self._waiting(record, found)) or (known[1] if known else ""), nodes)

    def logs(self, record: Record, *, rank: int | None, follow: bool) -> Iterator[str]:
        """Yields the lines that the pods print."""
        yield from read_logs(
            self.api,
            record.name,
            rank=rank,
            follow=follow,
            ended=lambda: not self.status(record).is_active,
            container=SUBMITTER if self.block.kind == "rayjob" else CONTAINER,
        )

    def stop(self, record: Record) -> None:
        """Suspends the workload: its pods get SIGTERM, save and end."""
        found = self._workload(record)
        if found is not None:
            stop_workload(self.api, self.block, found)

    def resume(self, record: Record) -> Record:
        """Resumes a suspended workload; recreates one that has ended."""
        found = self._workload(record)
        if found is not None and start_again(self.api, self.block, found):
            return record
        run = self._kept_run(record.name)
        if run is None:
            hint = "submit it again: the run goes on from its newest checkpoint"
            raise UserError(Problem(f"the cluster knows nothing of {record.name} any more", hint))
        self._delete(run)
        self._create(run)
        return self._record(run, time.time())

    def describe(self, record: Record) -> Iterator[str]:
        """Yields the workload, its pods with their nodes and reasons, and the latest events."""
        found = self._workload(record)
        status = self.status(record)
        yield f"{record.value('words')}: {status.state}"
        if status.why:
            yield f"  {status.why}"
        for pod in pods_of(self.api, record.name):
            where = pod.get("spec", {}).get("nodeName", "no node yet")
            words = "; ".join(pod_reasons(self.api, pod)) or ending(pod)
            yield f"pod {pod['metadata']['name']}: {phase_of(pod)}, {where}" + (f", {words}" if words else "")
        for event in events_of(self.api, found)[-5:] if found is not None else ():
            yield f"event: {event.get('reason', '')}: {event.get('message', '')}"

    def records(self) -> Sequence[Record]:
        """Returns the runs whose config maps are in the namespace."""
        found = []
        for kept in self.api.select("v1", "ConfigMap", labels=f"{MANAGED_BY}={STOKER}"):
            run = run_of_config_maps(kept)
            if run is not None:
                created = datetime.fromisoformat(kept["metadata"]["creationTimestamp"]).timestamp()
                found.append(self._record(run, created))
        return found

    def run_of(self, submission: Submission) -> ClusterRun:
        """Converts the submission for the manifests; once, because it compresses the files.

        Raises:
            UserError: what is sent is too large.
        """
        if self._run is None or self._run[0] is not submission:
            try:
                self._run = submission, run_of_submission(submission, self.block, self.chosen.name)
            except TooLarge:
                largest = max((f for f in submission.files if f.path != JOB), key=lambda file: file.size)
                message = f"what is sent has more bytes compressed than {MOST} config maps hold, {LARGEST * MOST}"
                hint = f"put {largest.path} ({largest.size} bytes) on a volume or at a URL, and name it by that"
                raise UserError(self.chosen.problem("", message, hint)) from None
        return self._run[1]

    def _create(self, run: ClusterRun) -> None:
        """Creates all objects, after a rehearsal by the server, and has the workload own the others."""
        objects = manifests(run, secret=new_value())
        for manifest in objects:
            self.api.rehearse(manifest)
        made: list[Manifest] = []
        try:
            for manifest in objects:
                made.append(self.api.create(manifest))
        except UserError:
            for manifest in reversed(made):
                self.api.delete(manifest["apiVersion"], manifest["kind"], manifest["metadata"]["name"])
            raise
        *others, owner = made
        reference = {
            "apiVersion": owner["apiVersion"],
            "kind": owner["kind"],
            "name": run.name,
            "uid": owner["metadata"]["uid"],
        }
        for manifest in others:
            change = {"metadata": {"ownerReferences": [reference]}}
            self.api.patch(manifest["apiVersion"], manifest["kind"], manifest["metadata"]["name"], change)

    def _delete(self, run: ClusterRun) -> None:
        """Deletes all objects of a run, and waits until they are gone."""
        objects = manifests(run, secret=None)
        for manifest in reversed(objects):
            self.api.delete(manifest["apiVersion"], manifest["kind"], manifest["metadata"]["name"], foreground=True)
        until = time.monotonic() + run.grace + 60
        while any(self.api.read(m["apiVersion"], m["kind"], m["metadata"]["name"]) for m in objects):
            if time.monotonic() > until:
                raise RunFailed(Problem(f"the cluster still ends the pods of {run.name}", "try it again in a minute"))
            time.sleep(0.5)

    def _record(self, run: ClusterRun, created: float) -> Record:
        # What is current here may change, and the run is asked for from any folder.
        there = {"namespace": self.api.namespace, "context": self.api.context, "kubeconfig": self.api.kubeconfig}
        block = run.block.model_copy(update=there).model_dump(mode="json")
        return Record(
            name=run.name,
            kind=self.chosen.kind,
            target=block,
            on=run.on,
            time=created,
            fingerprint=run.fingerprint,
            nodes=run.nodes,
            devices=run.devices,
            output=run.output,
            base=run.base,
            stages=list(run.stages),
            handle={
                "words": f"{workload(run)['kind']} {run.name} in the namespace {self.api.namespace}",
                "namespace": self.api.namespace,
                "api": workload(run)["apiVersion"],
                "kind": workload(run)["kind"],
            },
        )

    def _workload(self, record: Record) -> Manifest | None:
        return self.api.read(record.value("api"), record.value("kind"), record.name)

    def _kept_run(self, name: str) -> ClusterRun | None:
        kept = self.api.read("v1", "ConfigMap", name)
        parts = takewhile(bool, (self.api.read("v1", "ConfigMap", part_map(name, index)) for index in range(MOST)))
        return run_of_config_maps(kept, *filter(None, parts)) if kept is not None else None

    def _waiting(self, record: Record, found: Manifest) -> list[str]:
        """Returns the reasons for which pods are missing or do not run."""
        words = workload_reasons(events_of(self.api, found))
        run = self._kept_run(record.name)
        group = pod_group(run) if run is not None else None
        if group is not None:
            made = self.api.read(group["apiVersion"], group["kind"], record.name)
            words += group_reasons(made or {})
        for pod in pods_of(self.api, record.name):
            words += [f"{pod['metadata']['name']}: {word}" for word in pod_reasons(self.api, pod)]
        return list(dict.fromkeys(words))

    def _ended(self, pods: Sequence[Mapping[str, Any]], state: str) -> str:
        """Returns the exit codes and reasons of a failed run's pods."""
        failed = (pod for pod in pods if phase_of(pod) == "Failed") if state == "failed" else ()
        return "; ".join(f"{pod['metadata']['name']}: {ending(pod)}" for pod in failed)
