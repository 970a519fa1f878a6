"""The index of a checkpoint, ``.metadata``: its tensors and their places in the files.

It is a pickle, as torch.distributed.checkpoint writes it, and may come from a stranger. The reader executes only the
opcodes that an index consists of, on classes of its own, and makes torch's objects of the checked values.
"""

from __future__ import annotations

import pickle
from collections.abc import Collection
from io import BytesIO
from typing import Any, ClassVar

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from stoker.checkpoint.storage import METADATA

MOST_DIMENSIONS = 64

_OPCODES = (
    *(pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.MARK, pickle.MEMOIZE, pickle.BINGET, pickle.LONG_BINGET),
    *(pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1),
    *(pickle.SHORT_BINUNICODE, pickle.BINUNICODE, pickle.STACK_GLOBAL, pickle.NEWOBJ, pickle.REDUCE, pickle.BUILD),
    *(pickle.EMPTY_TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3, pickle.TUPLE),
    *(pickle.EMPTY_LIST, pickle.APPEND, pickle.APPENDS, pickle.EMPTY_DICT, pickle.SETITEM, pickle.SETITEMS),
)


class _Record:
    """An instance of one of the index's classes, with the state that the pickle gives it."""

    __slots__ = ("state",)
    state: Any


class _Dict(dict[Any, Any]):
    """A dict whose keys have cheap hashes: those of nested tuples can take exponential time."""

    def __setitem__(self, key: Any, value: Any) -> None:
        if type(key) is not str and not isinstance(key, _Record):
            raise _no_index()
        super().__setitem__(key, value)


def _no_index() -> pickle.UnpicklingError:
    return pickle.UnpicklingError(f"{METADATA} is not an index")


def _size(values: Any) -> torch.Size:
    if type(values) is not tuple or len(values) > MOST_DIMENSIONS or any(type(value) is not int for value in values):
        raise _no_index()
    return torch.Size(values)


def _unused(*_: Any) -> None:
    """Stands for what builds a layout or a memory format, which no checkpoint is read by."""


_KINDS = (
    *(Metadata, MetadataIndex, StorageMeta, _StorageInfo),
    *(TensorStorageMetadata, TensorProperties, ChunkStorageMetadata, BytesStorageMetadata),
)
_RECORDS: dict[type, type[_Record]] = {kind: type(kind.__name__, (_Record,), {"__slots__": ()}) for kind in _KINDS}
ALLOWED: dict[tuple[str, str], Any] = {
    **{(kind.__module__, kind.__name__): record for kind, record in _RECORDS.items()},
    **{("torch", name): found for name, found in vars(torch).items() if isinstance(found, torch.dtype)},
    ("torch", "Size"): _size,
    ("torch.serialization", "_get_layout"): _unused,
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"): _unused,
    ("builtins", "getattr"): _unused,  # Python before 3.11.4 pickles members of enumerations as calls of it
}


def _load_dict(unpickler: Any) -> None:
    unpickler.append(_Dict())


def _load_build(unpickler: Any) -> None:
    state = unpickler.stack.pop()
    record = unpickler.stack[-1]
    if not isinstance(record, _Record):  # a class or a function would keep the state
        raise _no_index()
    record.state = state


class _Unpickler(pickle._Unpickler):
    dispatch: ClassVar = {
        **{opcode[0]: pickle._Unpickler.dispatch[opcode[0]] for opcode in _OPCODES},
        pickle.EMPTY_DICT[0]: _load_dict,
        pickle.BUILD[0]: _load_build,
    }

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
    try:
        index = _metadata(_Unpickler(BytesIO(data)).load())
    except (LookupError, TypeError, ValueError, AttributeError, EOFError) as error:
        raise _no_index() from error
    if other := {info.relative_path for info in index.storage_data.values()} - set(files):
        raise pickle.UnpicklingError(f"{METADATA} names {min(other)}, which is no file of the checkpoint")
    return index


def _exactly(value: Any, *kinds: type) -> Any:
    if type(value) not in kinds:
        raise _no_index()
    return value


def _state(record: Any, kind: type) -> Any:
    return _exactly(_exactly(record, _RECORDS[kind]).state, _Dict)


def _metadata(record: Any) -> Metadata:
    state = _state(record, Metadata)
    stored, tensors = _exactly(state["storage_data"], _Dict), _exactly(state["state_dict_metadata"], _Dict)
    left = len(stored)  # chunks, each of which is stored once

    def tensor(record: Any) -> TensorStorageMetadata | BytesStorageMetadata:
        nonlocal left
        if type(record) is _RECORDS[BytesStorageMetadata]:
            return BytesStorageMetadata()
        state = _state(record, TensorStorageMetadata)
        chunks = _exactly(state["chunks"], list)
        left -= len(chunks)
        if left < 0:
            raise _no_index()
        dtype, *_ = _exactly(_exactly(state["properties"], _RECORDS[TensorProperties]).state, tuple)
        return TensorStorageMetadata(
            TensorProperties(_exactly(dtype, torch.dtype)),
            _exactly(state["size"], torch.Size),
            [_chunk(chunk) for chunk in chunks],
        )

    return Metadata(
        {_exactly(name, str): tensor(entry) for name, entry in tensors.items()},
        storage_data={_key(key): _place(place) for key, place in stored.items()},
        version=_exactly(state.get("version"), str, type(None)),
    )


def _chunk(record: Any) -> ChunkStorageMetadata:
    state = _state(record, ChunkStorageMetadata)
    return ChunkStorageMetadata(_exactly(state["offsets"], torch.Size), _exactly(state["sizes"], torch.Size))


def _key(record: Any) -> MetadataIndex:
    state = _state(record, MetadataIndex)
    offset = _exactly(state.get("offset"), torch.Size, type(None))
    return MetadataIndex(_exactly(state["fqn"], str), offset, _exactly(state.get("index"), int, type(None)))


def _place(record: Any) -> _StorageInfo:
    state = _state(record, _StorageInfo)
    if state.get("transform_descriptors"):
        raise _no_index()
    path, offset, length = state["relative_path"], state["offset"], state["length"]
    return _StorageInfo(_exactly(path, str), _exactly(offset, int), _exactly(length, int))
