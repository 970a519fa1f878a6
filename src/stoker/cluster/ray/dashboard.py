"""Requests to Ray's dashboard: its nodes, the files of jobs that it still has, and its errors as one line."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from stoker.errors import Problem, RunFailed

T = TypeVar("T")


def with_scheme(address: str) -> str:
    """Returns an address with ``http://`` before it if that was left out: Ray takes it for that of its own store."""
    import requests

    if "://" in address or address == "auto":
        return address
    with suppress(requests.RequestException):
        if requests.get(f"http://{address}/api/version", timeout=5).ok:
            return f"http://{address}"
    return address


def answer_of(ask: Callable[[], T]) -> T:
    """Calls Ray's client.

    Raises:
        RunFailed: the client's error, as one line.
    """
    try:
        return ask()
    except (RuntimeError, OSError) as error:  # the exceptions of `requests` are OSErrors
        raise RunFailed(Problem(f"Ray: {' '.join(str(error).split())[:300]}")) from error


def has_package(address: str, uri: str) -> bool:
    """Returns whether the cluster still has the files of a job: it drops those that no job has used for a time."""
    import requests

    protocol, _, name = uri.partition("://")
    package = f"{address}/api/packages/{protocol}/{name}"
    found = answer_of(lambda: requests.get(package, headers=_authentication(), timeout=30))
    return bool(found.status_code != requests.codes.not_found)


def nodes_at(address: str, *, timeout: float = 30.0) -> list[dict[str, Any]] | None:
    """Returns the total resources of each living node; None if the dashboard does not report them."""
    import requests

    try:
        url, headers = f"{address}/api/v0/nodes", _authentication()
        answer = requests.get(url, params={"detail": 1}, headers=headers, timeout=timeout).json()
        rows = answer["data"]["result"]["result"]
        return [row["resources_total"] or {} for row in rows if row["state"] == "ALIVE"]
    except (requests.RequestException, ValueError, KeyError, TypeError):
        return None


def _authentication() -> dict[str, str]:
    """Returns the headers by which Ray's own client authenticates itself; none where the cluster has no tokens."""
    try:
        from ray._private.authentication.http_token_authentication import get_auth_headers_if_auth_enabled
    except ImportError:  # before Ray 2.52, or no Ray
        return {}
    return dict(get_auth_headers_if_auth_enabled({}))
