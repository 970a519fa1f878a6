"""The pods of a run on a cluster: their states, the reasons why they wait, and their logs."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from stoker.cluster.kubernetes.cluster_api import ClusterApi
from stoker.cluster.kubernetes.manifest_fields import INSTANCE
from stoker.cluster.kubernetes.pending_reasons import claims_of, reasons
from stoker.cluster.kubernetes.pod_template import CONTAINER
from stoker.cluster.log_files import LABEL, of_rank
from stoker.errors import UserError

Object = Mapping[str, Any]
PLACEHOLDER = "yunikorn.apache.org/placeholder"  # annotation of a pod that reserves the place of one of the run
INDEX_LABELS = ("batch.kubernetes.io/job-completion-index", "volcano.sh/task-index")
WATCH = 60  # seconds of one watch
POLL = 2.0  # seconds without a line, after which the run's end is checked


def pods_of(api: ClusterApi, name: str) -> list[Object]:
    """Returns the run's pods in the order of their nodes; of a node that was started again, the older pod first."""
    found = api.select("v1", "Pod", labels=f"{INSTANCE}={name}")
    pods = (pod for pod in found if PLACEHOLDER not in pod["metadata"].get("annotations", {}))
    return sorted(pods, key=lambda pod: (index_of(pod), pod["metadata"].get("creationTimestamp", "")))


def index_of(pod: Object) -> int:
    """Returns the number of the pod's node; -1 of a pod that is not a node, such as the head of a Ray cluster."""
    labels = pod["metadata"].get("labels", {})
    return next((int(labels[key]) for key in INDEX_LABELS if key in labels), -1)


def phase_of(pod: Object) -> str:
    """Returns the phase, or that the pod is being ended."""
    if "deletionTimestamp" in pod["metadata"]:
        return "Terminating"
    return str(pod.get("status", {}).get("phase", "Pending"))


def pod_reasons(api: ClusterApi, pod: Object) -> list[str]:
    """Returns the reason why a pod does not run."""
    found = reasons(pod, events_of(api, pod))
    for name in claims_of(pod) if phase_of(pod) == "Pending" else ():
        claim = api.read("v1", "PersistentVolumeClaim", name)
        if claim is None:
            found.append(f"there is no volume claim {name}")
        elif claim.get("status", {}).get("phase") == "Pending":
            words = [event.get("message", "") for event in events_of(api, claim)]
            found.append(f"the volume claim {name} is not bound" + (f": {words[-1]}" if words else ""))
    return list(dict.fromkeys(found))


def events_of(api: ClusterApi, item: Object) -> list[Object]:
    """Returns the events of an object, the oldest first."""
    events = api.select("v1", "Event", fields=f"involvedObject.uid={item['metadata']['uid']}")
    return sorted(events, key=lambda event: event.get("lastTimestamp") or event.get("eventTime") or "")


def ending(pod: Object) -> str:
    """Describes the end of a pod's container by exit code and reason; empty while it runs."""
    for container in pod.get("status", {}).get("containerStatuses", []):
        ended = container.get("state", {}).get("terminated")
        if ended is not None:
            reason = ended.get("reason", "")
            more = f" ({reason})" if reason not in ("", "Completed", "Error") else ""
            return f"exit code {ended.get('exitCode')}{more}"
    return str(pod.get("status", {}).get("reason", ""))


def read_logs(
    api: ClusterApi,
    name: str,
    *,
    rank: int | None,
    follow: bool,
    ended: Callable[[], bool],
    container: str = CONTAINER,
) -> Iterator[str]:
    """Yields lines that the pods of a run print, in the form of `stoker.cluster.target.Target.logs`.

    Args:
        container: whose output is read, in the pods that have it.
        follow: continue, also with pods that are started later, until the run has ended.
    """
    if follow:
        lines = _followed(api, name, ended, container)
    else:
        pods = (pod for pod in pods_of(api, name) if _has_log(pod, container))
        lines = (line for pod in pods for line in _lines(api, pod, container, follow=False))
    yield from of_rank(lines, rank)


def _followed(api: ClusterApi, name: str, ended: Callable[[], bool], container: str) -> Iterator[str]:
    """Lines of all pods as they come, one thread a pod; pods are found by a watch."""
    found: queue.Queue[Object | str | BaseException | None] = queue.Queue()
    over = threading.Event()
    threading.Thread(target=_watch, args=(api, name, found, over), daemon=True).start()
    read: set[str] = set()
    reading, last = 0, False
    try:
        while True:
            try:
                item = found.get(timeout=POLL)
            except queue.Empty:
                if reading:
                    continue
                if last:
                    return
                last = ended()
                for pod in pods_of(api, name) if last else ():  # pods that the watch has not seen yet
                    found.put(pod)
                continue
            if item is None:
                reading -= 1
            elif isinstance(item, str):
                yield item
            elif isinstance(item, BaseException):
                raise item
            elif item["metadata"]["uid"] not in read and _has_log(item, container):
                read.add(item["metadata"]["uid"])
                threading.Thread(target=_read, args=(api, item, container, found), daemon=True).start()
                reading += 1
    finally:
        over.set()


def _watch(
    api: ClusterApi, name: str, found: queue.Queue[Object | str | BaseException | None], over: threading.Event
) -> None:
    """Puts the run's pods into the queue whenever they change. A watch that breaks off is begun again."""
    while not over.is_set():
        try:
            for pod in api.watch_pods(f"{INSTANCE}={name}", WATCH):
                found.put(pod)
                if over.is_set():
                    return
        except UserError:
            over.wait(POLL)


def _read(
    api: ClusterApi, pod: Object, container: str, found: queue.Queue[Object | str | BaseException | None]
) -> None:
    """Follows a pod's log to its end; puts its lines, errors, and a final None into the queue."""
    try:
        for line in _lines(api, pod, container, follow=True):
            found.put(line)
    except Exception as error:
        found.put(error)
    found.put(None)


def _lines(api: ClusterApi, pod: Object, container: str, *, follow: bool) -> Iterator[str]:
    """Lines of a pod's log; those of no rank with the pod's name before them."""
    for line in api.log(pod["metadata"]["name"], container, follow=follow):
        yield line if LABEL.match(line) else f"{pod['metadata']['name']} | {line}"


def _has_log(pod: Object, container: str) -> bool:
    for status in pod.get("status", {}).get("containerStatuses", []):
        if status["name"] == container:
            return not status.get("state", {}).keys().isdisjoint(("running", "terminated"))
    return False
