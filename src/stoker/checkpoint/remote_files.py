"""Files of a checkpoint at a URL, as torch.distributed.checkpoint reads them: through the node cache."""

from __future__ import annotations

import io
import os
from collections.abc import Generator
from contextlib import contextmanager

from torch.distributed.checkpoint._fsspec_filesystem import FileSystem

from stoker.checkpoint.remote import open_remote


class RemoteFiles(FileSystem):
    """torch's own file system of fsspec, which would have each process read from the store."""

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        """An open file; for reading only."""
        assert mode == "rb"
        with open_remote(str(path)) as file:
            yield file  # type: ignore[misc]  # what is open has the methods of it
