"""The secret that authenticates the supervisors of a run to each other."""

from __future__ import annotations

import secrets

from stoker.cluster.kubernetes.cluster_run import ClusterRun
from stoker.cluster.kubernetes.manifest_fields import Manifest, manifest
from stoker.cluster.kubernetes.node_script import SECRET_KEY
from stoker.cluster.kubernetes.pod_volumes import secret_name

BYTES = 32
ORIGIN = f"`stoker submit` draws {BYTES} random bytes for this key and keeps no copy"


def channel_secret(run: ClusterRun, *, value: str | None) -> Manifest:
    """Returns the secret.

    Args:
        value: None for a preview, which describes the value's origin instead.
    """
    origin = {"stoker/origin": f"{SECRET_KEY}: {ORIGIN}"}
    content = {} if value is None else {"stringData": {SECRET_KEY: value}}
    return manifest(run, "v1", "Secret", name=secret_name(run), annotations=origin, type="Opaque", **content)


def new_value() -> str:
    """Returns a new random value, in hexadecimal digits."""
    return secrets.token_hex(BYTES)
