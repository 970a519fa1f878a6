"""Runs the pods of the tests' cluster as processes of this machine.

A pod has an address of its own on the loopback network, the same one whenever its name comes back. Folders of a
container are folders below the pod's own; paths in its command and its variables are changed to those, and names of
pods to their addresses, which a cluster does by mounts and by its DNS.
"""

from __future__ import annotations

import base64
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from api_server import ApiServer

Object = dict[str, Any]
SOURCE = Path(__file__).parents[2] / "src"  # what the image has installed


@dataclass
class Running:
    """A pod's process, and when it is killed."""

    pod: Object
    process: subprocess.Popen[bytes]
    kill_at: float | None = None


def expanded(text: str, variables: Mapping[str, str]) -> str:
    """Replaces references to variables as Kubernetes does (third_party/forked/golang/expansion)."""
    return re.sub(r"\$(?:\$|\((\w+)\))", lambda found: variables.get(found[1], found[0]) if found[1] else "$", text)


class Kubelet:
    """The kubelets of all nodes."""

    def __init__(self, server: ApiServer) -> None:
        self.server = server
        self._running: dict[str, Running] = {}
        self._addresses: dict[str, str] = {}

    def look(self) -> None:
        """Starts pods that are placed, ends those that are deleted, and notes how processes ended."""
        for pod in self.server.all("pods"):
            uid = pod["metadata"]["uid"]
            running = self._running.get(uid)
            if running is None and not pod.get("ended"):
                if "deletionTimestamp" in pod["metadata"]:
                    pod["ended"] = True
                elif "nodeName" in pod["spec"]:
                    self._start(pod)
            elif running is not None:
                self._watch(running)
            if pod.get("ended") and "deletionTimestamp" in pod["metadata"]:
                self.server.remove(pod, "pods")

    def kill_all(self) -> None:
        """Kills all processes, with their children."""
        for running in self._running.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(running.process.pid, signal.SIGKILL)
            running.process.wait()

    def log_of(self, pod: Object) -> Path:
        """The file of what a pod has printed."""
        return self._folder(pod) / "log"

    def address(self, pod: Object) -> str:
        """The pod's address; the name ``HOST.SERVICE`` leads to it."""
        name = f"{pod['spec']['hostname']}.{pod['spec'].get('subdomain', '')}"
        return self.address_of(name)

    def address_of(self, name: str) -> str:
        """The address of a name."""
        return self._addresses.setdefault(name, f"127.0.1.{len(self._addresses) + 1}")

    def _folder(self, pod: Object) -> Path:
        return self.server.folder / "pods" / str(pod["metadata"]["uid"])

    def _start(self, pod: Object) -> None:
        (container,) = pod["spec"]["containers"]
        problem = self._cannot_start(pod, container)
        if problem is not None:
            waiting = {"reason": problem[0], "message": problem[1]}
            status = {"name": container["name"], "image": container["image"], "state": {"waiting": waiting}}
            if pod["status"].get("containerStatuses") != [status]:
                pod["status"]["containerStatuses"] = [status]
                self.server.update(pod, "pods")
            return
        folder = self._folder(pod)
        mounts = self._mounted(pod, container, folder)
        variables = self._variables(pod, container, mounts)
        given = (*container["command"], *container.get("args", []))
        words = [self._here(expanded(word, variables), mounts, pod) for word in given]
        log = self._opened(folder / "log")
        process = subprocess.Popen(
            words, env=variables, cwd=folder, stdout=log, stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        os.close(log)
        self._running[pod["metadata"]["uid"]] = Running(pod, process)
        pod["status"] |= {"phase": "Running", "podIP": self.address(pod)}
        pod["status"]["containerStatuses"] = [
            {"name": container["name"], "image": container["image"], "state": {"running": {}}}
        ]
        self.server.update(pod, "pods")

    def _opened(self, path: Path) -> int:
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def _cannot_start(self, pod: Object, container: Object) -> tuple[str, str] | None:
        if container["image"] not in self.server.images:
            return "ErrImagePull", f'failed to pull image "{container["image"]}": not found'
        for volume in pod["spec"].get("volumes", []):
            for kind, name, found in self._sources(volume):
                if found is None:
                    self.server.event(pod, "FailedMount", f'{kind.lower()} "{name}" not found')
                    return "ContainerCreating", ""
        for variable in container.get("env", []):
            reference = variable.get("valueFrom", {}).get("secretKeyRef")
            if reference is not None and self.server.one("secrets", reference["name"]) is None:
                return "CreateContainerConfigError", f'secret "{reference["name"]}" not found'
        return None

    def _mounted(self, pod: Object, container: Object, folder: Path) -> dict[str, Path]:
        """The folders of this machine by those of the container; files of config maps and secrets are written."""
        mounts = {}
        volumes = {volume["name"]: volume for volume in pod["spec"].get("volumes", [])}
        for mount in container.get("volumeMounts", []):
            volume = volumes[mount["name"]]
            place = folder / "volumes" / mount["name"]
            if "persistentVolumeClaim" in volume:
                place = self.server.folder / "claims" / volume["persistentVolumeClaim"]["claimName"]
            place.mkdir(parents=True, exist_ok=True)
            for _, _, found in self._sources(volume):
                assert found is not None
                for name, text in (*found.get("data", {}).items(), *found.get("stringData", {}).items()):
                    (place / name).write_text(text)
                for name, text in found.get("binaryData", {}).items():
                    (place / name).write_bytes(base64.b64decode(text))
            mounts[mount["mountPath"]] = place
        return mounts

    def _sources(self, volume: Object) -> Iterator[tuple[str, str, Object | None]]:
        """The config maps and secrets whose files a volume has: kind, name and object, None where there is none."""
        for source in (volume, *volume.get("projected", {}).get("sources", [])):
            for kind, plural, key in (("configMap", "configmaps", "name"), ("secret", "secrets", "secretName")):
                if kind in source:
                    yield kind, source[kind][key], self.server.one(plural, source[kind][key])

    def _here(self, text: str, mounts: dict[str, Path], pod: Object) -> str:
        """A text of the container with the paths and addresses of this machine."""
        for at in sorted(mounts, key=len, reverse=True):
            text = re.sub(rf"(?<![\w./-]){re.escape(at)}(?=[/\s\"':,)]|$)", str(mounts[at]), text)
        service = pod["spec"].get("subdomain")
        if service:
            text = re.sub(rf"[\w-]+\.{service}(?=:\d)", lambda found: self.address_of(found[0]), text)
        return text

    def _variables(self, pod: Object, container: Object, mounts: dict[str, Path]) -> dict[str, str]:
        found = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(SOURCE),
            "HOME": str(self._folder(pod)),
            "STOKER_CACHE": str(self.server.folder / "cache"),
            "OMP_NUM_THREADS": "1",
        }
        for variable in container.get("env", []):
            source = variable.get("valueFrom", {})
            if "fieldRef" in source:
                fields = {"metadata.name": pod["metadata"]["name"], "status.podIP": self.address(pod)}
                value = fields[source["fieldRef"]["fieldPath"]]
            elif "secretKeyRef" in source:
                secret = self.server.one("secrets", source["secretKeyRef"]["name"])
                assert secret is not None
                value = base64.b64decode(secret["data"][source["secretKeyRef"]["key"]]).decode()
            else:
                value = self._here(expanded(variable["value"], found), mounts, pod)
            found[variable["name"]] = value
        return found

    def _watch(self, running: Running) -> None:
        pod, process = running.pod, running.process
        if "deletionTimestamp" in pod["metadata"] and running.kill_at is None:
            running.kill_at = time.monotonic() + pod["spec"].get("terminationGracePeriodSeconds", 30)
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGTERM)
        if running.kill_at is not None and time.monotonic() > running.kill_at:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        code = process.poll()
        if code is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # a container's other processes end with its first one
        del self._running[pod["metadata"]["uid"]]
        code = 128 - code if code < 0 else code
        pod["ended"] = True
        pod["status"]["phase"] = "Succeeded" if code == 0 else "Failed"
        ended = {"exitCode": code, "reason": "Completed" if code == 0 else "Error"}
        pod["status"]["containerStatuses"][0]["state"] = {"terminated": ended}
        shutil.rmtree(self._folder(pod) / "volumes", ignore_errors=True)
        self.server.update(pod, "pods")
