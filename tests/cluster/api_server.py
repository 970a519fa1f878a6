"""A small Kubernetes API over HTTP for tests: objects of any kind, watches, logs; behind it a kubelet.

It keeps objects as JSON, refuses what the schemas of `manifest_schemas` refuse, and lets `cluster_controllers` make
pods of workloads, place them on nodes of given capacity, and run their commands as processes of this machine. What a
real cluster has beside it (admission webhooks, quotas of several kinds, networks, images) is not there.
"""

from __future__ import annotations

import copy
import itertools
import json
import threading
import time
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import parse_qs, urlsplit

from cluster_controllers import Controllers
from manifest_schemas import problems_of

Object = dict[str, Any]
Key = tuple[str, str, str]  # API version, plural, name
TICK = 0.05  # seconds between two looks of the controllers


class ApiServer:
    """A cluster with one namespace, ``default``.

    Args:
        folder: for the kubeconfig, the volumes and the logs of pods.
        nodes: resources by node.
        images: what a kubelet can pull; another image is an error of its pod.
        absent: API groups that the cluster does not have.

    Attributes:
        forbidden: (method, plural) pairs that are refused with 403.
        kubeconfig: a file by which the client connects.
    """

    def __init__(
        self, folder: Path, nodes: dict[str, dict[str, int]], images: set[str], absent: frozenset[str] = frozenset()
    ) -> None:
        self.folder, self.nodes, self.images, self.absent = folder, nodes, images, absent
        self.forbidden: set[tuple[str, str]] = set()
        self.objects: dict[Key, Object] = {}
        self.changes: list[tuple[str, Key, Object]] = []
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.controllers = Controllers(self)
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        self._http.daemon_threads = True
        self._http.cluster = self  # type: ignore[attr-defined]
        self._over = threading.Event()
        self.kubeconfig = folder / "kubeconfig"
        server = {"server": f"http://127.0.0.1:{self._http.server_address[1]}"}
        context = {"cluster": "test", "user": "me", "namespace": "default"}
        config = {
            "apiVersion": "v1", "kind": "Config", "current-context": "test",
            "clusters": [{"name": "test", "cluster": server}],
            "contexts": [{"name": "test", "context": context}],
            "users": [{"name": "me", "user": {"token": "letter"}}],
        }  # fmt: skip
        self.kubeconfig.write_text(json.dumps(config))

    def __enter__(self) -> Self:
        threading.Thread(target=self._http.serve_forever, daemon=True).start()
        self._work = threading.Thread(target=self._control, daemon=True)
        self._work.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._work.join()
        self.controllers.kill_all()
        self._http.shutdown()
        self._http.server_close()

    def _control(self) -> None:
        while not self._over.wait(TICK):
            with self.lock:
                self.controllers.look()

    def all(self, plural: str) -> list[Object]:
        """The objects of a plural, by name."""
        return [item for (_, own, _), item in sorted(self.objects.items()) if own == plural]

    def one(self, plural: str, name: str) -> Object | None:
        """An object of a plural by name."""
        return next((o for (_, p, n), o in self.objects.items() if p == plural and n == name), None)

    def create(self, version: str, plural: str, body: Object) -> Object:
        """Stores an object."""
        with self.changed:
            meta = body.setdefault("metadata", {})
            meta.setdefault("name", f"{meta.get('generateName', '')}{uuid.uuid4().hex[:5]}")
            meta |= {"uid": str(uuid.uuid4()), "namespace": "default", "creationTimestamp": now()}
            body.setdefault("status", {})
            body |= {"apiVersion": version}
            key = (version, plural, meta["name"])
            self.objects[key] = body
            self._tell("ADDED", key)
            return body

    def update(self, item: Object, plural: str) -> None:
        """Says that an object has changed."""
        with self.changed:
            self._tell("MODIFIED", (item["apiVersion"], plural, item["metadata"]["name"]))

    def remove(self, item: Object, plural: str) -> None:
        """Deletes an object and what it owns; a pod is ended first, by the kubelet."""
        with self.changed:
            key = (item["apiVersion"], plural, item["metadata"]["name"])
            if plural == "pods" and not item.get("ended"):
                if "deletionTimestamp" not in item["metadata"]:
                    item["metadata"]["deletionTimestamp"] = now()
                    self._tell("MODIFIED", key)
                return
            if self.objects.pop(key, None) is None:
                return
            self._tell("DELETED", key, item)
            uid = item["metadata"]["uid"]
            for (_, other, _), owned in list(self.objects.items()):
                if any(owner["uid"] == uid for owner in owned["metadata"].get("ownerReferences", [])):
                    self.remove(owned, other)

    def event(self, item: Object, reason: str, message: str, kind: str = "Warning") -> None:
        """An event of an object; the same one is told once."""
        uid = item["metadata"]["uid"]
        for known in self.all("events"):
            if (known["involvedObject"]["uid"], known["reason"], known["message"]) == (uid, reason, message):
                return
        of = {"kind": item.get("kind", "Pod"), "name": item["metadata"]["name"], "uid": uid}
        body = {"kind": "Event", "metadata": {"generateName": f"{of['name']}."}, "involvedObject": of, "type": kind}
        self.create("v1", "events", {**body, "reason": reason, "message": message, "lastTimestamp": now()})

    def _tell(self, what: str, key: Key, item: Object | None = None) -> None:
        item = self.objects[key] if item is None else item
        item["metadata"]["resourceVersion"] = str(len(self.changes) + 1)
        self.changes.append((what, key, copy.deepcopy(item)))
        self.changed.notify_all()


def now() -> str:
    """The time as objects have it."""
    return datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


class _Refused(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class _Handler(BaseHTTPRequestHandler):
    """One request: /api/v1/namespaces/default/PLURAL[/NAME[/log]], or the same below /apis/GROUP/VERSION."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_: Any) -> None:
        """Nothing is printed."""

    def do_GET(self) -> None:
        self._answer(self._get)

    def do_POST(self) -> None:
        self._answer(self._post)

    def do_PATCH(self) -> None:
        self._answer(self._patch)

    def do_DELETE(self) -> None:
        self._answer(self._delete)

    def _answer(self, method: Any) -> None:
        self.cluster: ApiServer = self.server.cluster  # type: ignore[attr-defined]
        split = urlsplit(self.path)
        self.query = {key: values[0] for key, values in parse_qs(split.query).items()}
        length = int(self.headers.get("Content-Length") or 0)
        self.body = json.loads(self.rfile.read(length) or b"null")
        parts = split.path.strip("/").split("/")
        try:
            self.version = parts[1] if parts[0] == "api" else "/".join(parts[1:3])
            rest = parts[2:] if parts[0] == "api" else parts[3:]
            if self.version.split("/")[0] in self.cluster.absent:
                raise _Refused(404, "the server could not find the requested resource")
            _, namespace, self.plural, *self.name = rest
            if namespace != "default":
                raise _Refused(404, f'namespaces "{namespace}" not found')
            if (self.command, self.plural) in self.cluster.forbidden:
                raise _Refused(403, f'{self.plural} is forbidden: User "me" cannot {self.command.lower()} resource')
            method()
        except _Refused as error:
            self._send(
                {"kind": "Status", "status": "Failure", "message": str(error), "code": error.status}, error.status
            )
        except BrokenPipeError:
            pass

    def _send(self, answer: Object, status: int = 200) -> None:
        content = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _found(self) -> Object:
        found = self.cluster.objects.get((self.version, self.plural, self.name[0]))
        if found is None:
            raise _Refused(404, f'{self.plural} "{self.name[0]}" not found')
        return found

    def _get(self) -> None:
        if self.name and self.name[1:] == ["log"]:
            self._stream(self._log_lines())
        elif self.name:
            self._send(self._found())
        elif self.query.get("watch", "").lower() == "true":
            self._stream(self._watched())
        else:
            with self.cluster.lock:
                items = [item for key, item in sorted(self.cluster.objects.items()) if self._wanted(key, item)]
                self._send(
                    {"kind": "List", "metadata": {"resourceVersion": str(len(self.cluster.changes))}, "items": items}
                )

    def _wanted(self, key: Key, item: Object) -> bool:
        if key[:2] != (self.version, self.plural):
            return False
        labels = item["metadata"].get("labels", {})
        chosen = (pair.split("=") for pair in self.query.get("labelSelector", "").split(",") if pair)
        if any(labels.get(name) != value for name, value in chosen):
            return False
        path, _, value = self.query.get("fieldSelector", "").partition("=")
        found: Any = item
        for part in path.split(".") if path else ():
            found = found.get(part, {})
        return not path or found == value

    def _watched(self) -> Iterator[bytes]:
        """Objects that are there, then changes, for the seconds that were asked for."""
        until = time.monotonic() + float(self.query.get("timeoutSeconds", 60))
        with self.cluster.lock:
            there = [copy.deepcopy(i) for k, i in sorted(self.cluster.objects.items()) if self._wanted(k, i)]
            seen = len(self.cluster.changes)
        for item in there:
            yield json.dumps({"type": "ADDED", "object": item}).encode() + b"\n"
        while time.monotonic() < until:
            with self.cluster.changed:
                if len(self.cluster.changes) == seen:
                    self.cluster.changed.wait(timeout=0.5)
                new, seen = self.cluster.changes[seen:], len(self.cluster.changes)
            for what, key, item in new:
                if self._wanted(key, item):
                    yield json.dumps({"type": what, "object": item}).encode() + b"\n"

    def _log_lines(self) -> Iterator[bytes]:
        """What a pod has printed; with follow, until it has ended."""
        pod = self._found()
        path = self.cluster.controllers.kubelet.log_of(pod)
        if not path.exists():
            raise _Refused(400, "container is waiting to start")
        with path.open("rb") as file:
            while True:
                ended = bool(pod.get("ended")) or self.query.get("follow", "").lower() != "true"
                while content := file.read(65536):
                    yield content
                if ended:
                    return
                time.sleep(TICK)

    def _stream(self, chunks: Iterator[bytes]) -> None:
        first = next(chunks, b"")  # a refusal comes before the headers
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for chunk in itertools.chain([first], chunks):
            if chunk:
                self.wfile.write(b"%x\r\n%s\r\n" % (len(chunk), chunk))
                self.wfile.flush()
        self.wfile.write(b"0\r\n\r\n")

    def _post(self) -> None:
        name = self.body["metadata"].get("name", "")
        if self.query.get("fieldValidation") == "Strict":
            try:
                problems = problems_of(self.body)
            except FileNotFoundError:  # no upstream definitions at hand: see test_kubernetes_manifests
                problems = []
            if problems and not name.endswith("-"):
                raise _Refused(400, f"strict decoding error: {problems[0]}")
        with self.cluster.lock:
            if (self.version, self.plural, name) in self.cluster.objects:
                raise _Refused(409, f'{self.plural} "{name}" already exists')
            if self.query.get("dryRun") == "All":
                return self._send(self.body, 201)
            return self._send(self.cluster.create(self.version, self.plural, self.body), 201)

    def _patch(self) -> None:
        with self.cluster.lock:
            found = self._found()
            _merge(found, self.body)
            self.cluster.update(found, self.plural)
            self._send(found)

    def _delete(self) -> None:
        with self.cluster.lock:
            found = self._found()
            self.cluster.remove(found, self.plural)
            self._send(found)


def _merge(item: Object, change: Object) -> None:
    for key, value in change.items():
        if isinstance(value, dict) and isinstance(item.get(key), dict):
            _merge(item[key], value)
        elif value is None:
            item.pop(key, None)
        else:
            item[key] = value
