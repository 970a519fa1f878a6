"""The index of a checkpoint, ``.metadata``: its tensors and their places in the files.

It is a pickle, as torch.distributed.checkpoint writes it. The reader accepts only the few classes that an index
consists of, so a checkpoint from a stranger runs no code.
"""

from __future__ import annotations

import pickle
from collections.abc import Collection
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from stoker.checkpoint.storage import METADATA

_OF_METADATA = (
    "Metadata",
    "MetadataIndex",
    "StorageMeta",
    "TensorStorageMetadata",
    "TensorProperties",
    "ChunkStorageMetadata",
    "BytesStorageMetadata",
    "_MEM_FORMAT_ENCODING",
)


def _member(kind: Any, name: str) -> Any:
    """Returns a member of the index's only enumeration, which Python before 3.11.4 pickles as a call of getattr."""
    if kind is not metadata._MEM_FORMAT_ENCODING or name not in kind.__members__:
        raise pickle.UnpicklingError(f"{METADATA} names an attribute, which is no part of an index")
    return kind[name]


ALLOWED: dict[tuple[str, str], Any] = {
    ("builtins", "getattr"): _member,
    **{("torch.distributed.checkpoint.metadata", name): getattr(metadata, name) for name in _OF_METADATA},
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): filesystem._StorageInfo,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    ("torch", "Size"): torch.Size,
    **{("torch", name): found for name, found in vars(torch).items() if isinstance(found, torch.dtype)},
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return ALLOWED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"{METADATA} names {module}.{name}, which is no part of an index") from None


def read_index(data: bytes, files: Collection[str]) -> Metadata:
    """Parses the index from a file's bytes.

    Args:
        files: files of the checkpoint; the index may name no others.

    Raises:
        pickle.UnpicklingError: the data is not an index, or names anything else.
    """
    index = _Unpickler(BytesIO(data)).load()
    if not isinstance(index, Metadata):
        raise pickle.UnpicklingError(f"{METADATA} is not an index")
    if other := {info.relative_path for info in index.storage_data.values()} - set(files):
        raise pickle.UnpicklingError(f"{METADATA} names {min(other)}, which is no file of the checkpoint")
    return index


class RestrictedReader(dcp.FileSystemReader):
    """Reads a checkpoint's files with the restricted index.

    Args:
        place: the checkpoint's folder, or its URL.
        files: files of the checkpoint.
    """

    def __init__(self, place: Path | str, files: Collection[str]) -> None:
        super().__init__(place)
        self._files = files
        if isinstance(place, str):
            from stoker.checkpoint.remote_files import RemoteFiles

            # The same assignment as in torch's own FsspecReader.
            self.fs = RemoteFiles()  # type: ignore[assignment]
            self.path = self.fs.init_path(place)

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """Reads the checkpoint's index."""
        with self.fs.create_stream(self.fs.concat_path(self.path, METADATA), "rb") as file:
            index = read_index(file.read(), self._files)
        index.storage_meta = index.storage_meta or StorageMeta()
        index.storage_meta.load_id = self.load_id
        return index
