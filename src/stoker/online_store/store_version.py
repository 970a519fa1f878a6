"""The common parts of stores with versions: changes of a table, and a version."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from stoker.online_store.row_backends import StoredTable

ABANDONED = 3600.0  # seconds without a row after which a version that was never finished is removed


@dataclass(frozen=True)
class TableDelta:
    """Changes of a table.

    Attributes:
        ids, rows: int64 [n] and their rows as bytes, uint8 [n, row_bytes].
        removed: ids that have no row any more.
    """

    table: StoredTable
    ids: np.ndarray
    rows: np.ndarray
    removed: np.ndarray


@dataclass(frozen=True)
class StoredVersion:
    """A version of a store.

    Attributes:
        info: of the manifest: the run, its step, when it was made.
    """

    number: int
    info: Mapping[str, Any]


def head_of(manifest: Mapping[str, Any], version: int) -> str:
    """Returns an identifier that changes with every update of a version, and if a store is emptied and filled again."""
    of_earlier = f"{version}.{manifest.get('updates', 0)}"  # versions of Stoker, whose manifests have no id
    return f"{of_earlier}.{manifest['id']}" if "id" in manifest else of_earlier


def info_of(manifest: Mapping[str, Any]) -> str:
    """Returns a version's entry in a list of versions, as JSON."""
    return json.dumps({name: manifest.get(name) for name in ("run", "step", "made")})
