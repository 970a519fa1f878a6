"""What makes pods of workloads and places them in the tests' cluster: JobSet, Job, Kueue's admission, the scheduler."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from cluster_kubelet import Kubelet

if TYPE_CHECKING:
    from api_server import ApiServer

Object = dict[str, Any]
INDEX = "batch.kubernetes.io/job-completion-index"


class Controllers:
    """Looks at all objects, again and again, and does what is next."""

    def __init__(self, server: ApiServer) -> None:
        self.server = server
        self.kubelet = Kubelet(server)

    def look(self) -> None:
        """One round."""
        for jobset in self.server.all("jobsets"):
            self._jobset(jobset)
        for job in self.server.all("jobs"):
            if job["apiVersion"] == "batch/v1":
                self._admit(job)
                self._job(job)
        self._schedule()
        self.kubelet.look()

    def kill_all(self) -> None:
        """Ends all processes."""
        self.kubelet.kill_all()

    def evict(self, name: str) -> None:
        """Evicts a pod as a drained node does: it is marked, gets SIGTERM, and goes."""
        with self.server.lock:
            pod = self.server.one("pods", name)
            assert pod is not None
            mark = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}
            pod["status"].setdefault("conditions", []).append(mark)
            self.server.remove(pod, "pods")

    def _jobset(self, jobset: Object) -> None:
        """A JobSet's only Job."""
        name = jobset["metadata"]["name"]
        (part,) = jobset["spec"]["replicatedJobs"]
        job = self.server.one("jobs", f"{name}-{part['name']}-0")
        suspended = bool(jobset["spec"].get("suspend"))
        if job is None:
            if jobset["status"].get("conditions"):
                return
            body = copy.deepcopy(part["template"])
            body["metadata"] = {
                **body.get("metadata", {}),
                "name": f"{name}-{part['name']}-0",
                "ownerReferences": [_owner(jobset)],
            }
            body["spec"]["suspend"] = suspended
            body["spec"]["template"]["spec"]["subdomain"] = jobset["spec"]["network"]["subdomain"]
            self.server.create("batch/v1", "jobs", {"kind": "Job", **body})
        elif bool(job["spec"].get("suspend")) != suspended:
            job["spec"]["suspend"] = suspended
            self.server.update(job, "jobs")
        elif job["status"].get("conditions") and not jobset["status"].get("conditions"):
            names = {"Complete": "Completed"}
            found = [{**c, "type": names.get(c["type"], c["type"])} for c in job["status"]["conditions"]]
            jobset["status"]["conditions"] = found
            self.server.update(jobset, "jobsets")

    def _admit(self, job: Object) -> None:
        """Kueue: a suspended job with a queue is started once no other one of the queue is at work."""
        queue = job["metadata"].get("labels", {}).get("kueue.x-k8s.io/queue-name")
        if queue is None or job["status"].get("conditions"):
            return
        name = f"job-{job['metadata']['name']}"
        queued = self.server.one("workloads", name)
        if queued is None:
            body = {
                "kind": "Workload",
                "metadata": {"name": name, "ownerReferences": [_owner(job)]},
                "spec": {"active": True},
            }
            queued = self.server.create("kueue.x-k8s.io/v1beta2", "workloads", body)
        others = [
            j
            for j in self.server.all("jobs")
            if j is not job and not j["spec"].get("suspend") and not j["status"].get("conditions")
        ]
        free = queued["spec"]["active"] and not others
        full = "" if free else f"couldn't assign flavors to pod set main: insufficient quota in queue {queue}"
        reserved = {"type": "QuotaReserved", "status": str(free), "message": full}
        queued["status"]["conditions"] = [reserved]
        if bool(job["spec"].get("suspend")) == free:
            job["spec"]["suspend"] = not free
            self.server.update(job, "jobs")

    def _job(self, job: Object) -> None:
        """An indexed Job: a pod for each index, retries by exit code and index, an end."""
        spec, status = job["spec"], job["status"]
        done = status.setdefault("done", {})
        failures = status.setdefault("failures", {})
        pods = [p for p in self.server.all("pods") if _owner(job) in p["metadata"]["ownerReferences"]]
        if status.get("conditions"):
            return
        if spec.get("suspend"):
            for pod in pods:
                self.server.remove(pod, "pods")
            return
        for pod in pods:
            index = pod["metadata"]["labels"][INDEX]
            if pod.get("counted") or not pod.get("ended"):
                continue
            pod["counted"] = True
            if pod["status"]["phase"] == "Succeeded":
                done[index] = True
                continue
            action = _failure_action(spec, pod)
            if action == "FailJob":
                why = f"Container node for pod {pod['metadata']['name']} failed with exit code {_exit_code(pod)}"
                return self._end(job, pods, "Failed", "PodFailurePolicy", f"{why} matching FailJob rule")
            if action == "Count":
                failures[index] = failures.get(index, 0) + 1
                if failures[index] > spec["backoffLimitPerIndex"]:
                    return self._end(
                        job,
                        pods,
                        "Failed",
                        "MaxFailedIndexesExceeded",
                        "Job has exceeded the specified maximal number of failed indexes",
                    )
        if len(done) == spec["completions"]:
            return self._end(job, [], "Complete", "CompletionsReached", "Reached expected number of succeeded pods")
        alive = {pod["metadata"]["labels"][INDEX] for pod in pods if not pod.get("ended")}
        for index in map(str, range(spec["completions"])):
            if index not in done and index not in alive:
                self._create_pod(job, index)
        return None

    def _end(self, job: Object, pods: list[Object], kind: str, reason: str, message: str) -> None:
        for pod in pods:
            if not pod.get("ended"):
                self.server.remove(pod, "pods")
        job["status"]["conditions"] = [{"type": kind, "status": "True", "reason": reason, "message": message}]
        self.server.update(job, "jobs")

    def _create_pod(self, job: Object, index: str) -> None:
        name = job["metadata"]["name"]
        template = copy.deepcopy(job["spec"]["template"])
        labels = {**template["metadata"]["labels"], INDEX: index, "batch.kubernetes.io/job-name": name}
        meta = {
            **template["metadata"],
            "labels": labels,
            "generateName": f"{name}-{index}-",
            "ownerReferences": [_owner(job)],
        }
        spec = {**template["spec"], "hostname": f"{name}-{index}"}
        self.server.create(
            "v1", "pods", {"kind": "Pod", "metadata": meta, "spec": spec, "status": {"phase": "Pending"}}
        )

    def _schedule(self) -> None:
        """Pods of a group are placed together or not at all; others alone."""
        waiting = [
            p
            for p in self.server.all("pods")
            if "nodeName" not in p["spec"] and "deletionTimestamp" not in p["metadata"]
        ]
        groups: dict[str, list[Object]] = {}
        for pod in waiting:
            name = pod["metadata"]["labels"].get("scheduling.x-k8s.io/pod-group")
            name = name or pod["spec"].get("schedulingGroup", {}).get("podGroupName") or pod["metadata"]["name"]
            groups.setdefault(name, []).append(pod)
        for name, pods in groups.items():
            group = self.server.one("podgroups", name)
            spec = group["spec"] if group is not None else {}
            least = spec.get("minMember") or spec.get("schedulingPolicy", {}).get("gang", {}).get("minCount") or 1
            running = [
                p
                for p in self.server.all("pods")
                if "nodeName" in p["spec"]
                and not p.get("ended")
                and p["metadata"]["labels"].get("app.kubernetes.io/instance") == name
            ]
            places = self._places(pods)
            if len(places) + (len(running) if group is not None else 0) < least:
                message = f"pod group {name}: {len(places)} of {least} pods could be placed"
                if group is not None:
                    group["status"]["conditions"] = [
                        {"type": "PodGroupScheduled", "status": "False", "message": message}
                    ]
                places = []
            for pod, node in places:
                pod["spec"]["nodeName"] = node
                pod["status"]["conditions"] = [{"type": "PodScheduled", "status": "True"}]
                self.server.update(pod, "pods")
            for pod in pods:
                if "nodeName" not in pod["spec"]:
                    self._unschedulable(pod)

    def _places(self, pods: list[Object]) -> list[tuple[Object, str]]:
        free = {node: dict(resources) for node, resources in self.server.nodes.items()}
        for pod in self.server.all("pods"):
            if "nodeName" in pod["spec"] and not pod.get("ended"):
                for name, count in _requests(pod).items():
                    free[pod["spec"]["nodeName"]][name] -= count
        places = []
        for pod in pods:
            for node, left in free.items():
                if all(left.get(name, 0) >= count for name, count in _requests(pod).items()):
                    for name, count in _requests(pod).items():
                        left[name] -= count
                    places.append((pod, node))
                    break
        return places

    def _unschedulable(self, pod: Object) -> None:
        count = len(self.server.nodes)
        lacking = ", ".join(f"{count} Insufficient {name}" for name in _requests(pod))
        message = f"0/{count} nodes are available: {lacking}. preemption: 0/{count} nodes are available."
        condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
        if pod["status"].get("conditions") != [condition]:
            pod["status"]["conditions"] = [condition]
            self.server.update(pod, "pods")
            self.server.event(pod, "FailedScheduling", message)


def _owner(item: Object) -> Object:
    meta = item["metadata"]
    return {"apiVersion": item["apiVersion"], "kind": item["kind"], "name": meta["name"], "uid": meta["uid"]}


def _requests(pod: Object) -> dict[str, int]:
    """Whole resources that a pod asks for; cores and memory are not counted."""
    asked = pod["spec"]["containers"][0].get("resources", {}).get("requests", {})
    return {name: count for name, count in asked.items() if "/" in name}


def _exit_code(pod: Object) -> int:
    return int(pod["status"]["containerStatuses"][0]["state"]["terminated"]["exitCode"])


def _failure_action(spec: Object, pod: Object) -> str:
    """The action of the first rule of the pod failure policy that fits; Count without one."""
    for rule in spec.get("podFailurePolicy", {}).get("rules", []):
        codes = rule.get("onExitCodes")
        if codes is not None and _exit_code(pod) in codes["values"]:
            return str(rule["action"])
        for wanted in rule.get("onPodConditions", []):
            if any(c["type"] == wanted["type"] and c["status"] == "True" for c in pod["status"].get("conditions", [])):
                return str(rule["action"])
    return "Count"
