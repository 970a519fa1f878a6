"""The archive that is sent, split into parts if it is large: a config map holds 1 MiB."""

from __future__ import annotations

import base64
import io
import tarfile
from collections.abc import Mapping, Sequence
from typing import Any

from stoker.cluster.kubernetes.cluster_run import ClusterRun
from stoker.cluster.sent_files import SentFile

LARGEST = 1_000_000  # bytes of a config map; the limit of 1 MiB includes the names
MOST = 8  # config maps of one archive: all of them are in the memory of the API server
ARCHIVE = "files.tar.xz"  # its parts are ARCHIVE.0, ARCHIVE.1 ...


class TooLarge(Exception):
    """The files do not fit into the config maps of a run."""


def archive_of(files: Sequence[SentFile]) -> bytes | None:
    """Returns the files as a tar.xz that depends on their names and contents alone; None for no files.

    Raises:
        TooLarge: it does not fit into `MOST` config maps. Files are not read further than that.
    """
    if not files:
        return None
    buffer = _LimitedBuffer()
    with tarfile.open(fileobj=buffer, mode="w:xz", format=tarfile.PAX_FORMAT) as archive:
        for file in sorted(files, key=lambda file: file.path):
            entry = tarfile.TarInfo(file.path)
            entry.size = file.size
            with io.BytesIO(file.read()) if file.source is None else file.source.open("rb") as content:
                archive.addfile(entry, content)
    return buffer.getvalue()


class _LimitedBuffer(io.BytesIO):
    """A buffer of as many bytes as the config maps hold."""

    def write(self, data: Any) -> int:
        if self.tell() + len(data) > LARGEST * MOST and not self._full:
            self._full = True  # closing the archive writes its end
            raise TooLarge
        return len(data) if self._full else super().write(data)

    _full = False


def parts_of(run: ClusterRun) -> list[bytes]:
    """Splits the archive: one part if it fits beside the job, none if nothing is sent."""
    if run.archive is None:
        return []
    if size_of(run) <= LARGEST:
        return [run.archive]
    return [run.archive[begin : begin + LARGEST] for begin in range(0, len(run.archive), LARGEST)]


def part_map(name: str, index: int) -> str:
    """Name of the config map with a part."""
    return f"{name}-files-{index}"


def size_of(run: ClusterRun) -> int:
    """Bytes that Kubernetes counts."""
    return len(run.job.encode()) + len(run.record_text().encode()) + len(run.archive or b"")


def kept_archive(own: Mapping[str, Any], parts: Sequence[Mapping[str, Any]]) -> bytes | None:
    """Returns the archive in the config maps; None if they have none.

    Raises:
        ValueError: it is not base64.
    """
    found = [
        binary[name] for kept in (own, *parts) if (binary := kept.get("binaryData", {})) for name in sorted(binary)
    ]
    return b"".join(map(base64.b64decode, found)) if found else None
