"""The index of a checkpoint, as every supported Python writes it."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

from stoker.checkpoint.dcp_metadata import read_index


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
    index.storage_meta = None  # has a path here, unlike those of checkpoints
    older = io.BytesIO()
    Older(older).dump(index)
    assert b"getattr" in older.getvalue()
    assert read_index(older.getvalue(), ["__0_0.distcp"]) == index


@pytest.mark.parametrize(
    "of", [(torch.Size, "count"), (_MEM_FORMAT_ENCODING, "__class__"), (_MEM_FORMAT_ENCODING, "mro")]
)
def test_other_attributes_are_refused(of: tuple[Any, str]) -> None:
    with pytest.raises(pickle.UnpicklingError, match="an attribute"):
        read_index(pickle.dumps(Attribute(*of)), [])
