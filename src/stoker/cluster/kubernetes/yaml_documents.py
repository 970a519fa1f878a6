"""Writes manifests as YAML documents, as a person would: no nulls, no anchors, scripts as block literals."""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.scalarstring import LiteralScalarString

from stoker.cluster.kubernetes.manifest_fields import Manifest

WIDTH = 4096  # columns: long values, such as base64, stay on a line


def as_yaml(documents: Iterable[Manifest], comments: dict[str, str] | None = None) -> str:
    """Returns the documents, with ``---`` between them.

    Args:
        comments: a line before the document of a kind, by kind.
    """
    writer = YAML(pure=True)
    writer.width = WIDTH
    writer.representer.ignore_aliases = lambda *_: True
    texts = []
    for document in documents:
        buffer = io.StringIO()
        writer.dump(_literal(document), buffer)
        comment = (comments or {}).get(document["kind"])
        texts.append((f"# {comment}\n" if comment else "") + buffer.getvalue())
    return "---\n".join(texts)


def _literal(value: Any) -> Any:
    """Returns the value with texts of several lines as literal blocks, and empty mappings as ``{}``."""
    if isinstance(value, dict):
        return {key: _literal(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_literal(inner) for inner in value]
    if isinstance(value, str) and "\n" in value:
        return LiteralScalarString(value)
    return value
