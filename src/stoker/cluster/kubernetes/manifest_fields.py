"""Parts that all manifests share: optional fields, names and labels, amounts of resources."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from stoker.cluster.kubernetes.cluster_run import ClusterRun

Manifest = dict[str, Any]
NAME, INSTANCE, MANAGED_BY = (f"app.kubernetes.io/{key}" for key in ("name", "instance", "managed-by"))
OWN_LABELS = (NAME, INSTANCE, MANAGED_BY)
STOKER = "stoker"
FINGERPRINT = "stoker/fingerprint"  # annotation: digest of all that was sent


def without_empty(**fields: Any) -> Manifest:
    """Returns a mapping without the fields that are None, empty lists or empty mappings."""
    return {key: value for key, value in fields.items() if isinstance(value, Present) or value not in (None, [], {})}


def literal(text: str) -> str:
    """Returns a text of ``args`` or ``env`` that Kubernetes reads back as it is: it replaces ``$(NAME)`` and ``$$``."""
    return re.sub(r"\$+(?=\()|\${2,}", lambda found: 2 * found[0], text)


class Present(dict[str, Any]):
    """A mapping that is written although it is empty, such as ``emptyDir: {}``."""


def manifest(
    run: ClusterRun,
    version: str,
    kind: str,
    *,
    name: str = "",
    labels: Mapping[str, str] | None = None,
    annotations: Mapping[str, str] | None = None,
    **fields: Any,
) -> Manifest:
    """Returns an object of the run, with fields such as ``spec``; see `metadata`."""
    marks = metadata(run, name, labels=labels, annotations=annotations)
    return {"apiVersion": version, "kind": kind, "metadata": marks, **fields}


def metadata(
    run: ClusterRun,
    name: str = "",
    *,
    labels: Mapping[str, str] | None = None,
    annotations: Mapping[str, str] | None = None,
) -> Manifest:
    """Name, namespace, labels and annotations of an object of the run; by default the object has the run's name."""
    return without_empty(
        name=name or run.name,
        namespace=run.block.namespace,
        labels={**run_labels(run), **(labels or {})},
        annotations={FINGERPRINT: run.fingerprint, **(annotations or {})},
    )


def run_labels(run: ClusterRun) -> dict[str, str]:
    """Labels by which all objects of the run are found, and the user's own."""
    return {NAME: STOKER, INSTANCE: run.name, MANAGED_BY: STOKER, **run.block.labels}


def multiply_quantity(quantity: int | str, count: int) -> int | str:
    """Returns an amount several times: 3 x ``32Gi`` is ``96Gi``; 3 x ``1.5Gi`` is ``4.5Gi``."""
    if isinstance(quantity, int):
        return quantity * count
    number, unit = re.fullmatch(r"([0-9.]+)([A-Za-z]*)", quantity).groups()  # type: ignore[union-attr]
    return f"{float(number) * count:.12g}{unit}"
