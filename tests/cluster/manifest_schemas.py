"""Checks manifests as a server in strict mode does: by the upstream definitions, and Kubernetes' own schemas.

The upstream definitions (Volcano, JobSet, the Kubeflow trainer, KubeRay, PodGroups, Fluid) are not part of this
repository: STOKER_CRDS names a folder with them as JSON, ``<plural>.<group>.json``; else ``shared/crd`` beside it.
"""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate

ROOT = Path(__file__).parents[2]
FOLDER = Path(os.environ.get("STOKER_CRDS", ROOT.parent / "shared" / "crd"))
BUILT_IN = ("", "batch", "resource.k8s.io", "scheduling.k8s.io")  # groups of Kubernetes itself
VERSION = "1.37"  # of Kubernetes, for its own kinds


def problems_of(manifest: dict[str, Any]) -> list[str]:
    """What the server would refuse; empty for a valid manifest.

    Raises:
        FileNotFoundError: the definition of its kind is not there.
    """
    group, _, version = manifest["apiVersion"].rpartition("/")
    if group in BUILT_IN:
        try:
            kubernetes_validate.validate(manifest, VERSION, strict=True)
        except kubernetes_validate.ValidationError as error:
            return [f"{'.'.join(map(str, error.path))}: {error.message}"]
        return []
    checker = jsonschema.Draft202012Validator(schema_of(group, manifest["kind"], version))
    return [f"{'.'.join(map(str, error.path))}: {error.message}" for error in checker.iter_errors(manifest)]


@cache
def schema_of(group: str, kind: str, version: str) -> dict[str, Any]:
    """The JSON schema of a kind in strict mode."""
    definition = json.loads((FOLDER / f"{kind.lower()}s.{group}.json").read_text())
    (found,) = (each for each in definition["spec"]["versions"] if each["name"] == version)
    schema = strict(found["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = metadata_schema()
    return schema


def strict(schema: dict[str, Any]) -> dict[str, Any]:
    """An OpenAPI schema of a definition as a JSON schema that takes no unknown field."""
    made = {key: value for key, value in schema.items() if not key.startswith("x-kubernetes") and key != "nullable"}
    if "properties" in schema:
        made["properties"] = {key: strict(value) for key, value in schema["properties"].items()}
        if "additionalProperties" not in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
            made["additionalProperties"] = False
    if isinstance(schema.get("additionalProperties"), dict):
        made["additionalProperties"] = strict(schema["additionalProperties"])
    if isinstance(schema.get("items"), dict):
        made["items"] = strict(schema["items"])
    for word in ("anyOf", "allOf", "oneOf"):
        if word in schema:
            made[word] = [strict(each) for each in schema[word]]
    if schema.get("x-kubernetes-int-or-string"):
        made.pop("type", None)
        made["anyOf"] = [{"type": "integer"}, {"type": "string"}]
    if schema.get("nullable"):
        return {"anyOf": [made, {"type": "null"}]}
    return made


def metadata_schema() -> dict[str, Any]:
    """What a manifest says of itself."""
    texts = {"type": "object", "additionalProperties": {"type": "string"}}
    name = {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$", "maxLength": 63}
    fields = {"name": name, "namespace": name, "labels": texts, "annotations": texts}
    return {"type": "object", "properties": fields, "additionalProperties": False}
