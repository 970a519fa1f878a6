"""The common parts of stores with versions: changes of a table, a version, and the protocol to write one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

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


class StoreWriter(Protocol):
    """A store with versions. A change of one version never affects another one."""

    place: str

    def begin(self) -> int:
        """Returns the number of a new version, which no reader sees."""

    def put(self, version: int, delta: TableDelta) -> None:
        """Writes rows of a version that no reader sees yet, and deletes others.

        Raises:
            StoreError: the version was not begun in this store, or is gone.
        """

    def change(self, version: int, deltas: Sequence[TableDelta]) -> None:
        """Writes rows of a version that is read; what else belongs to the change follows by `update`.

        Raises:
            StoreError: the version is gone.
        """

    def seal(self, version: int, manifest: Mapping[str, Any], files: Mapping[str, bytes]) -> None:
        """Makes a version readable by its number; `versions` has it once `switch` has made it current."""

    def update(
        self, version: int, deltas: Sequence[TableDelta], manifest: Mapping[str, Any], files: Mapping[str, bytes]
    ) -> None:
        """Changes of a version that is read: rows first, in LMDB all at one moment.

        Raises:
            StoreError: the version is gone.
        """

    def switch(self, version: int) -> None:
        """Makes a version the current one.

        Raises:
            StoreError: the version is gone.
        """

    def drop(self, version: int) -> None:
        """Removes a version, or an incomplete one."""

    def current(self) -> int:
        """Returns the current version; 0 if there is none."""

    def versions(self) -> list[StoredVersion]:
        """Returns the versions that are or were current, ascending."""

    def rows_of(self, version: int, table: StoredTable) -> int:
        """Returns the number of rows of a table."""


def head_of(manifest: Mapping[str, Any], version: int) -> str:
    """Returns an identifier that changes with every update of a version."""
    return f"{version}.{manifest.get('updates', 0)}"


def info_of(manifest: Mapping[str, Any]) -> str:
    """Returns a version's entry in a list of versions, as JSON."""
    return json.dumps({name: manifest.get(name) for name in ("run", "step", "made")})
