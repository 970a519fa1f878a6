"""File system of a checkpoint at a URL for torch.distributed.checkpoint, reading through the node cache."""

from __future__ import annotations

import io
import os
from collections.abc import Generator
from contextlib import contextmanager

from torch.distributed.checkpoint._fsspec_filesystem import FileSystem

from stoker.checkpoint.remote import open_remote


class RemoteFiles(FileSystem):
    """torch's fsspec file system, changed so that not every process downloads from the store."""

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        """Opens a file for reading."""
        assert mode == "rb"
        with open_remote(str(path)) as file:
            yield file  # type: ignore[misc]  # the open file has the same methods
