"""The index of a checkpoint, as every supported Python writes it."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from stoker.checkpoint.dcp_metadata import read_index

WHOLE = ChunkStorageMetadata(torch.Size([0]), torch.Size([3]))


class Older(pickle.Pickler):
    """Pickles members of enumerations as Python before 3.11.4 does."""

    def reducer_override(self, value: Any) -> Any:
        return (getattr, (type(value), value.name)) if isinstance(value, _MEM_FORMAT_ENCODING) else NotImplemented


class Attribute:
    """Is unpickled as an attribute of something."""

    def __init__(self, of: Any, name: str) -> None:
        self._of, self._name = of, name

    def __reduce__(self) -> Any:
        return getattr, (self._of, self._name)


def test_an_index_of_an_older_python_is_read(tmp_path: Path) -> None:
    dcp.save({"weight": torch.ones(3)}, checkpoint_id=tmp_path)
    index = pickle.loads((tmp_path / ".metadata").read_bytes())
    index.storage_meta = index.planner_data = None  # no checkpoint is read by them
    older = io.BytesIO()
    Older(older).dump(index)
    assert b"getattr" in older.getvalue()
    assert read_index(older.getvalue(), ["__0_0.distcp"]) == index


@pytest.mark.parametrize(
    "of", [(torch.Size, "count"), (_MEM_FORMAT_ENCODING, "__class__"), (_MEM_FORMAT_ENCODING, "mro")]
)
def test_other_attributes_are_refused(of: tuple[Any, str]) -> None:
    with pytest.raises(pickle.UnpicklingError, match="is not an index"):
        read_index(pickle.dumps(Attribute(*of)), [])


def text(value: str) -> bytes:
    return b"\x8c" + bytes([len(value)]) + value.encode()


@pytest.mark.parametrize("name", ["Metadata", "StorageMeta", "_MEM_FORMAT_ENCODING"])
def test_an_index_changes_no_class(name: str) -> None:
    state = b"N}" + text("relative_path") + text("../outside") + b"s\x86"
    build = text(metadata.__name__) + text(name) + b"\x93" + state + b"b"
    with pytest.raises(pickle.UnpicklingError, match="is not an index"):
        read_index(b"\x80\x04" + build + b".", [])
    assert not hasattr(getattr(metadata, name), "relative_path")
    assert read_index(pickle.dumps(Metadata({}, storage_data={})), []) == Metadata({}, storage_data={})


@pytest.mark.parametrize("dimensions", [64, 65])
def test_a_tensor_of_more_dimensions_than_torch_has_is_refused(dimensions: int) -> None:
    entry = TensorStorageMetadata(TensorProperties(), torch.Size([1] * dimensions), [])
    index = pickle.dumps(Metadata({"weight": entry}, storage_data={}))
    if dimensions == 64:
        assert len(read_index(index, []).state_dict_metadata["weight"].size) == 64
    else:
        with pytest.raises(pickle.UnpicklingError, match="is not an index"):
            read_index(index, [])


def test_an_index_with_nested_tuples_as_a_key_is_refused() -> None:
    key = b")\x94h\x00\x86" + b"".join(b"\x94h" + bytes([level]) + b"\x86" for level in range(1, 60))
    with pytest.raises(pickle.UnpicklingError, match="is not an index"):
        read_index(b"\x80\x04}" + key + b"Ns.", [])


@pytest.mark.parametrize(
    "other",
    [
        {"storage_data": StorageMeta()},
        {"storage_data": {"weight": _StorageInfo("a", 0, 1)}},
        {"storage_data": {MetadataIndex("weight"): _StorageInfo(("a",), 0, 1)}},  # type: ignore[arg-type]
        {"storage_data": {MetadataIndex("weight"): _StorageInfo("a", 0, 1, ["zstd"])}},
        {"state_dict_metadata": {"weight": TensorStorageMetadata(TensorProperties(), torch.Size([3]), [WHOLE] * 2)}},
    ],
)
def test_values_of_other_types_are_refused(other: dict[str, Any]) -> None:
    content = {"state_dict_metadata": {}, "storage_data": {MetadataIndex("weight"): _StorageInfo("a", 0, 1)}} | other
    with pytest.raises(pickle.UnpicklingError, match="is not an index"):
        read_index(pickle.dumps(Metadata(**content)), ["a"])


@pytest.mark.parametrize("path", ["../outside", "/outside", "b"])
def test_files_that_are_not_the_checkpoints_own_are_refused(path: str) -> None:
    places = {MetadataIndex("weight"): _StorageInfo("a", 0, 1), MetadataIndex("other"): _StorageInfo(path, 0, 1)}
    with pytest.raises(pickle.UnpicklingError, match=f"names {path}, which is no file of the checkpoint"):
        read_index(pickle.dumps(Metadata({}, storage_data=places)), ["a"])
    read_index(pickle.dumps(Metadata({}, storage_data=places)), ["a", path])
