"""The cluster's API by the official client: create, read, change and delete objects of any kind, watch pods, read logs.

Objects are JSON as dictionaries. The client is imported when a cluster is opened, not before.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stoker.cluster.kubernetes.manifest_fields import Manifest
from stoker.cluster.kubernetes.pending_reasons import quota
from stoker.errors import CannotRun, Problem, RunFailed, UserError, did_you_mean, reason_of

if TYPE_CHECKING:
    from kubernetes.client import ApiClient

CONNECT = 10.0  # seconds within which the API server must be reached
ANSWER = 60.0  # and answer
STRICT, REHEARSAL = ("fieldValidation", "Strict"), ("dryRun", "All")
INSTALL = {  # the project that installs a kind that Kubernetes itself does not have
    "batch.volcano.sh": "Volcano",
    "bus.volcano.sh": "Volcano",
    "scheduling.volcano.sh": "Volcano",
    "jobset.x-k8s.io": "JobSet",
    "trainer.kubeflow.org": "the Kubeflow trainer",
    "ray.io": "KubeRay",
    "scheduling.x-k8s.io": "scheduler-plugins (Coscheduling)",
    "scheduling.sigs.k8s.io": "Koordinator",
    "scheduling.k8s.io": "Kubernetes 1.37 with the feature gate GenericWorkload",
    "resource.k8s.io": "Kubernetes 1.34 with a DRA driver",
    "data.fluid.io": "Fluid",
    "kueue.x-k8s.io": "Kueue",
}


class ClusterApi:
    """A cluster and a namespace of it.

    Args:
        kubeconfig, context: by default as kubectl finds them; within a pod, its service account.
        namespace: by default the context's.

    Raises:
        UserError: the client is not installed, or there is no such kubeconfig or context.
    """

    def __init__(self, kubeconfig: str | None, context: str | None, namespace: str | None) -> None:
        try:
            from kubernetes.dynamic import DynamicClient
        except ImportError as error:
            hint = "install it: pip install 'stoker[kubernetes]'"
            raise UserError(Problem("the target needs the package kubernetes", hint)) from error
        self.kubeconfig = kubeconfig_path(kubeconfig)
        self.client, found, self.context = _client(kubeconfig, context)
        self.namespace = namespace or found
        # Only the dynamic client's requests are used: its discovery caches to a file with a predictable name.
        self._requests = DynamicClient(self.client, discoverer=lambda *_: None)

    def create(self, manifest: Manifest) -> Manifest:
        """Creates an object; fields that the server does not know are an error of the server's."""
        return self._ask("post", manifest["apiVersion"], manifest["kind"], body=manifest, query=[STRICT])

    def rehearse(self, manifest: Manifest) -> None:
        """Has the server check whether `create` would succeed; passes if a webhook does not support dry runs."""
        try:
            self._ask("post", manifest["apiVersion"], manifest["kind"], body=manifest, query=[STRICT, REHEARSAL])
        except UserError as error:
            if "does not support dry run" not in str(error):
                raise

    def read(self, version: str, kind: str, name: str) -> Manifest | None:
        """Returns an object; None if it does not exist."""
        return self._ask("get", version, kind, name) or None

    def select(self, version: str, kind: str, *, labels: str = "", fields: str = "") -> list[Manifest]:
        """Returns the objects of a kind with these labels and fields; none if the cluster does not have the kind."""
        query = [(key, value) for key, value in (("labelSelector", labels), ("fieldSelector", fields)) if value]
        return list((self._ask("get", version, kind, query=query) or {}).get("items", []))

    def patch(self, version: str, kind: str, name: str, change: Mapping[str, Any]) -> Manifest:
        """Changes an object by a merge patch."""
        return self._ask("patch", version, kind, name, body=dict(change))

    def delete(self, version: str, kind: str, name: str, *, foreground: bool = False) -> None:
        """Deletes an object with its dependents; does nothing if it does not exist.

        Args:
            foreground: keep the object until all its dependents are gone.
        """
        policy = "Foreground" if foreground else "Background"
        self._ask("delete", version, kind, name, body={"propagationPolicy": policy})

    def log(self, pod: str, container: str, *, follow: bool) -> Iterator[str]:
        """Lines of a container's log, without line ends."""
        query = [("container", container), ("follow", "true" if follow else "false")]
        yield from self._stream(f"the log of {pod}", f"pods/{pod}/log", query, None)

    def watch_pods(self, labels: str, seconds: int) -> Iterator[Manifest]:
        """Yields the pods with those labels, each again when it changes, until the time is over."""
        query = [("labelSelector", labels), ("watch", "true"), ("timeoutSeconds", f"{seconds}")]
        for line in self._stream("the pods", "pods", query, seconds + ANSWER):
            event = json.loads(line)
            if event["type"] in ("ADDED", "MODIFIED"):
                yield event["object"]

    def _stream(self, what: str, path: str, query: list[tuple[str, str]], wait: float | None) -> Iterator[str]:
        """Lines of an answer, as they come.

        Args:
            wait: seconds without a line after which the answer has failed; None for a log, which may be silent.
        """
        full = f"/api/v1/namespaces/{self.namespace}/{path}"
        with self._answers(what):
            answer = self._requests.request(
                "get", full, serialize=False, query_params=query, _request_timeout=(CONNECT, wait)
            )
            rest = b""
            for chunk in answer.stream(amt=None):
                *lines, rest = (rest + chunk).split(b"\n")
                yield from (line.decode(errors="replace") for line in lines)
            if rest:
                yield rest.decode(errors="replace")

    def _ask(
        self,
        method: str,
        version: str,
        kind: str,
        name: str = "",
        *,
        body: Manifest | None = None,
        query: Sequence[tuple[str, str]] = (),
    ) -> Manifest:
        """Sends a request; returns {} if the object to read or delete does not exist."""
        prefix = "/api" if "/" not in version else "/apis"
        path = f"{prefix}/{version}/namespaces/{self.namespace}/{kind.lower()}s" + (f"/{name}" if name else "")
        params: dict[str, Any] = {"query_params": list(query)}
        if method == "patch":
            params["content_type"] = "application/merge-patch+json"
        absent_is_fine = method in ("get", "delete")
        with self._answers(f"{kind} {name or (body or {}).get('metadata', {}).get('name', '')}".strip(), version):
            try:
                answer = self._requests.request(
                    method, path, body=body, serialize=False, _request_timeout=(CONNECT, ANSWER), **params
                )
            except Exception as error:
                if absent_is_fine and getattr(error, "status", None) == 404:
                    return {}
                raise
            return dict(json.loads(answer.data or b"{}"))

    @contextmanager
    def _answers(self, what: str, version: str = "") -> Iterator[None]:
        """Turns the client's errors into those of the user, the cluster or the network."""
        from kubernetes.client.exceptions import ApiException
        from urllib3.exceptions import HTTPError

        try:
            yield
        except ApiException as error:
            raise self._error(what, version, int(error.status or 0), _message(error)) from error
        except HTTPError as error:
            host = self.client.configuration.host
            reason = getattr(error, "reason", None) or error
            raise RunFailed(
                Problem(f"the cluster's API at {host} does not answer: {reason}", "is it reachable?")
            ) from error

    def _error(self, what: str, version: str, status: int, message: str) -> UserError:
        """Returns the error of an answer; the first line that fits."""
        group = version.partition("/")[0] if "/" in version else ""
        there = f"in the namespace {self.namespace}"
        lines: tuple[tuple[bool, type[UserError], str, str], ...] = (
            (
                status == 401,
                UserError,
                f"the cluster does not know this user: {message}",
                "log in to the cluster again",
            ),
            (status == 403 and "exceeded quota" in message, CannotRun, f"{what}: {quota(message)}", "ask for less"),
            (status == 403, UserError, f"this user may not: {message}", "docs/kubernetes.md lists the rights it takes"),
            (
                status == 404 and "namespaces" in message,
                UserError,
                f"there is no namespace {self.namespace}",
                "create it",
            ),
            (
                status == 404 and group in INSTALL,
                UserError,
                f"the cluster has no {what.partition(' ')[0]} of {version}",
                f"it comes with {INSTALL.get(group, '')}",
            ),
            (
                status == 409,
                UserError,
                f"{what} exists already {there}",
                "`stoker resume` or `stoker stop` that run, or give this one another name: --name",
            ),
            (status in (400, 422), UserError, f"the cluster refuses {what}: {message}", ""),
        )
        for fits, kind, text, hint in lines:
            if fits:
                return kind(Problem(text, hint))
        return RunFailed(Problem(f"the cluster's API has failed at {what}: {message}"))


def _client(kubeconfig: str | None, context: str | None) -> tuple[ApiClient, str, str | None]:
    """Returns the client, the namespace of its context, and the context's name; None for a pod's service account."""
    from kubernetes import config
    from kubernetes.client import ApiClient, Configuration
    from kubernetes.config.incluster_config import SERVICE_TOKEN_FILENAME

    if kubeconfig is not None:
        written, kubeconfig = kubeconfig, kubeconfig_path(kubeconfig) or ""
        if not any(Path(path).is_file() for path in kubeconfig.split(os.pathsep)):
            raise UserError(Problem(f"there is no kubeconfig {written}", "name the file", "kubeconfig"))
    try:
        if kubeconfig is None and context is None and not _has_kubeconfig() and Path(SERVICE_TOKEN_FILENAME).is_file():
            settings = Configuration()
            config.load_incluster_config(client_configuration=settings)
            namespace = Path(SERVICE_TOKEN_FILENAME).with_name("namespace").read_text().strip()
            return ApiClient(settings), namespace, None
        contexts, active = config.list_kube_config_contexts(config_file=kubeconfig)
        if context is not None and context not in [each["name"] for each in contexts]:
            names = [str(each["name"]) for each in contexts]
            hint = did_you_mean(context, names, 0.6) or f"it has {', '.join(names)}"
            raise UserError(Problem(f"the kubeconfig has no context {context}", hint, "context"))
        chosen = next((each for each in contexts if each["name"] == context), active)
        client = config.new_client_from_config(config_file=kubeconfig, context=context)
        return client, chosen["context"].get("namespace") or "default", chosen["name"]
    except UserError:
        raise
    except Exception as error:  # for a damaged file the client may raise any exception
        hint = "write `kubeconfig: FILE`, set KUBECONFIG, or log in to the cluster"
        file = kubeconfig or os.environ.get("KUBECONFIG") or str(Path("~/.kube/config").expanduser())
        if not any(Path(part).is_file() for part in file.split(os.pathsep)):
            raise UserError(Problem(f"there is no kubeconfig {file}", hint, "kubeconfig")) from error
        message = f"{file} is not a usable kubeconfig: {reason_of(error)}"
        raise UserError(Problem(message, hint, "kubeconfig")) from error


def kubeconfig_path(written: str | None) -> str | None:
    """Returns the absolute path of a kubeconfig, or of each file in $KUBECONFIG; None for kubectl's default."""
    paths = [written] if written else os.environ.get("KUBECONFIG", "").split(os.pathsep)
    return os.pathsep.join(str(Path(path).expanduser().absolute()) for path in paths if path) or None


def _has_kubeconfig() -> bool:
    return "KUBECONFIG" in os.environ or Path("~/.kube/config").expanduser().is_file()


def _message(error: Any) -> str:
    """Returns the server's error: the message of its status object, or the reason."""
    try:
        return str(json.loads(error.body)["message"])
    except (TypeError, ValueError, KeyError):
        return str(error.reason or error)
