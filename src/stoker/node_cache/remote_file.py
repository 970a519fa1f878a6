"""A file at a URL, with the methods of a path that readers of data use."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from stoker.node_cache.file_locks import HeldLock
from stoker.node_cache.object_cache import RemoteObject, node_cache
from stoker.node_cache.object_reader import ObjectReader
from stoker.node_cache.urls import name_of, without_secrets


@dataclass(frozen=True)
class RemoteFile:
    """An object that is read through this machine's cache. As text it is its URL, without a signature."""

    found: RemoteObject

    def __str__(self) -> str:
        return without_secrets(self.found.url)

    @property
    def name(self) -> str:
        return name_of(self.found.url)

    @property
    def suffix(self) -> str:
        return PurePosixPath(self.name).suffix

    @property
    def parts(self) -> tuple[str, ...]:
        """Folders and name of the path, without scheme and host."""
        return PurePosixPath(str(self).partition("://")[2].partition("/")[2].lstrip("/")).parts

    @property
    def size(self) -> int:
        """Size in bytes; 0 if the origin does not report it."""
        return self.found.version.size or 0

    @property
    def identity(self) -> str:
        """An identifier of its content; empty if the origin reports none."""
        version = self.found.version
        return version.checksum or (f"{version.size} {version.tag}" if version.tag else "")

    def open(self) -> ObjectReader:
        """Opens the content, which may still be downloading."""
        return ObjectReader(node_cache(), self.found)

    def fetch(self) -> tuple[Path, HeldLock]:
        """Downloads the whole content; returns the file and the lock that prevents its eviction."""
        return node_cache().fetch(self.found)


DataFile = Path | RemoteFile
