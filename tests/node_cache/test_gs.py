"""Google Cloud Storage by an emulator of its API: objects, listings, checksums, and checkpoints in the same store.

The emulator has no gRPC, by which gcsfs asks for the kind of a bucket.
"""

from __future__ import annotations

import json
import os
import random
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from object_downloads import left_part

from stoker.data.files.readers import decode
from stoker.data.files.rows import Raw
from stoker.data.sources import open_source
from stoker.errors import UserError
from stoker.job.blocks.source_block import SourceBlock
from stoker.node_cache import origin as origins
from stoker.node_cache.object_cache import NodeCache

os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"  # read when gcsfs is first imported, by any test
MIB = 2**20


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    from gcp_storage_emulator import server as emulator

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    served = emulator.create_server("127.0.0.1", port, in_memory=True)
    served.start()
    yield f"http://127.0.0.1:{port}"
    served.stop()


@pytest.fixture
def bucket(server: str, cache: NodeCache, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The store with an empty bucket ``bucket``, by gcsfs."""
    import gcsfs

    monkeypatch.setenv("STORAGE_EMULATOR_HOST", server)
    origins._file_system.cache_clear()
    made = gcsfs.GCSFileSystem(project="test", token="anon", skip_instance_cache=True, use_listings_cache=False)
    made.mkdir("bucket")
    yield made
    made.rm("bucket", recursive=True)
    origins._file_system.cache_clear()


def texts(path: str) -> list[str]:
    source = open_source(SourceBlock(path=path), Path("/nowhere"))
    values = [decode(row) for row in source.rows() if isinstance(row, Raw)]
    return [value["text"] for value in values if isinstance(value, dict)]


def test_objects_folders_and_patterns(bucket: Any) -> None:
    for name in ("data/b.jsonl", "data/a.jsonl", "data/deep/c.jsonl", "other/d.jsonl"):
        bucket.pipe_file(f"bucket/{name}", json.dumps({"text": name}).encode() + b"\n")
    assert texts("gs://bucket/data/a.jsonl") == ["data/a.jsonl"]
    assert texts("gs://bucket/data/") == ["data/a.jsonl", "data/b.jsonl", "data/deep/c.jsonl"]
    assert texts("gs://bucket/*/*.jsonl") == ["data/a.jsonl", "data/b.jsonl", "other/d.jsonl"]
    for gone in ("gs://bucket/gone.jsonl", "gs://elsewhere/gone.jsonl"):
        with pytest.raises(UserError, match=f"there is no object {gone}"):
            texts(gone)


def test_an_object_of_several_parts_is_fetched_in_order_and_checked(bucket: Any, cache: NodeCache) -> None:
    data = random.Random(0).randbytes(20 * MIB + 5)
    bucket.pipe_file("bucket/x", data)
    found = cache.version("gs://bucket/x")
    assert found.version.checksum.startswith("md5:")
    left_part(cache, found, b"y" * MIB)  # damaged here, after an earlier download
    path, pin = cache.fetch(found)
    with pin:
        assert path.read_bytes() == data


def test_checkpoints_go_to_the_same_store_and_come_back(bucket: Any) -> None:
    import torch

    from stoker.checkpoint.dcp_store import Store
    from stoker.checkpoint.state import State

    tensors = {"a": torch.arange(300_000, dtype=torch.float32), "b": torch.ones(3, 5)}
    store = Store("gs://bucket/run/checkpoints")
    assert store.steps() == []
    store.save(State(3, tensors, {"n": 1}))
    store.save(State(4, tensors, {"n": 2}))
    assert store.steps() == [3, 4]
    found = store.load(3)
    assert found.numbers == {"n": 1} and found.tensors.keys() == tensors.keys()
    assert all(torch.equal(found.tensors[name], tensors[name]) for name in tensors)
    store.storage.delete(3)
    store.storage.delete(4)
    assert store.steps() == []
