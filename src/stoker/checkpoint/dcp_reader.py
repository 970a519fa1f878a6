"""Reads a checkpoint's files, with the restricted index, for torch.distributed.checkpoint."""

from __future__ import annotations

import io
import os
from collections.abc import Collection, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from stoker.checkpoint.dcp_metadata import read_index
from stoker.checkpoint.remote import open_remote
from stoker.checkpoint.storage import METADATA


class RestrictedReader(FileSystemReader):
    """Reads a checkpoint's files with the restricted index.

    Args:
        place: the checkpoint's folder, or its URL.
        files: files of the checkpoint.
    """

    def __init__(self, place: Path | str, files: Collection[str]) -> None:
        super().__init__(place)
        self._files = files
        if isinstance(place, str):
            self.fs, self.path = _RemoteFiles(), place

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """Reads the checkpoint's index."""
        with self.fs.create_stream(self.fs.concat_path(self.path, METADATA), "rb") as file:
            index = read_index(file.read(), self._files)
        index.storage_meta = StorageMeta(load_id=self.load_id)
        return index


class _RemoteFiles(FileSystem):
    """Files at a URL, read through the node cache, so that not every process downloads them from the store."""

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        assert mode == "rb"
        with open_remote(str(path)) as file:
            yield file  # type: ignore[misc]  # the open file has the same methods

    def concat_path(self, path: str | os.PathLike[str], suffix: str) -> str:
        return f"{path}/{suffix}"
