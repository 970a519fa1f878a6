"""S3 by moto's server: objects, listings, checksums, credentials, and checkpoints in the same store."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from moto.server import ThreadedMotoServer
from object_downloads import left_part

from stoker.data.files.readers import decode
from stoker.data.files.rows import Raw
from stoker.data.sources import open_source
from stoker.errors import RunFailed, UserError
from stoker.job.blocks.source_block import SourceBlock
from stoker.node_cache import origin as origins
from stoker.node_cache.cache_stats import HERE
from stoker.node_cache.object_cache import NodeCache
from stoker.node_cache.object_version import ObjectVersion

MIB = 2**20


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    served = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    served.start()
    host, port = served.get_host_and_port()
    yield f"http://{host}:{port}"
    served.stop()


@pytest.fixture
def bucket(server: str, cache: NodeCache, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The bucket ``bucket`` of a store, by AWS's own client."""
    import boto3

    monkeypatch.setenv("AWS_ENDPOINT_URL", server)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION"):
        monkeypatch.setenv(name, "us-east-1" if "REGION" in name else "test")
    origins._file_system.cache_clear()
    made = boto3.resource("s3").Bucket("bucket")
    made.create()
    yield made
    made.objects.all().delete()
    made.delete()
    origins._file_system.cache_clear()


def lines(*texts: str) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


def texts(path: str) -> list[str]:
    source = open_source(SourceBlock(path=path), Path("/nowhere"))
    values = [decode(row) for row in source.rows() if isinstance(row, Raw)]
    return [value["text"] for value in values if isinstance(value, dict)]


def test_objects_folders_and_patterns(bucket: Any) -> None:
    for name in ("data/b.jsonl", "data/a.jsonl", "data/deep/c.jsonl", "other/d.jsonl"):
        bucket.put_object(Key=name, Body=lines(name))
    assert texts("s3://bucket/data/a.jsonl") == ["data/a.jsonl"]
    assert (
        texts("s3://bucket/data/") == texts("s3://bucket/data") == ["data/a.jsonl", "data/b.jsonl", "data/deep/c.jsonl"]
    )
    assert texts("s3://bucket/*/*.jsonl") == ["data/a.jsonl", "data/b.jsonl", "other/d.jsonl"]


def test_objects_of_several_parts_are_fetched_in_order(bucket: Any, cache: NodeCache) -> None:
    import random

    data = random.Random(0).randbytes(20 * MIB + 5)
    bucket.put_object(Key="x", Body=data)
    path, pin = cache.fetch(cache.version("s3://bucket/x"))
    with pin:
        assert path.read_bytes() == data


def test_the_md5_of_an_object_in_one_part_is_checked(bucket: Any, cache: NodeCache) -> None:
    bucket.put_object(Key="x", Body=b"x" * MIB)
    found = cache.version("s3://bucket/x")
    left_part(cache, found, b"y" * (MIB // 2))  # damaged here, after an earlier download
    path, pin = cache.fetch(found)
    with pin:
        assert path.read_bytes() == b"x" * MIB
    origin = origins.OriginStore("s3://bucket/x")
    assert origin.checksum("s3://bucket/x", found.version).startswith("md5:")
    assert origin.checksum("s3://bucket/x", ObjectVersion(MIB, f"tag {'0' * 32}-2")) == ""


def test_what_is_not_there_and_what_may_not_be_read(bucket: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="there is no object s3://bucket/gone"):
        texts("s3://bucket/gone.jsonl")
    with pytest.raises(UserError, match="no object s3://other/gone"):
        texts("s3://other/gone.jsonl")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", "/nowhere")
    origins._file_system.cache_clear()
    with pytest.raises(UserError, match="give credentials as for the AWS command line"):
        texts("s3://bucket/x.jsonl?")


def test_a_store_that_does_not_answer(cache: NodeCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setattr(origins, "TRIES", 1)
    origins._file_system.cache_clear()
    with pytest.raises(RunFailed, match=r"s3://bucket/x.jsonl cannot be reached"):
        texts("s3://bucket/x.jsonl")
    origins._file_system.cache_clear()


@pytest.mark.slow
def test_checkpoints_go_to_the_same_store_and_come_back_once(bucket: Any, cache: NodeCache) -> None:
    import torch

    from stoker.checkpoint.dcp_store import Store
    from stoker.checkpoint.state import State

    tensors = {"a": torch.arange(300_000, dtype=torch.float32), "b": torch.ones(3, 5)}
    store = Store("s3://bucket/run/checkpoints")
    assert store.steps() == []
    store.save(State(3, tensors, {"n": 1}))
    store.save(State(4, tensors, {"n": 2}))
    assert store.steps() == [3, 4]
    before = HERE.counts.origin_bytes
    for _ in range(2):
        found = store.load(3)
        assert found.numbers == {"n": 1} and found.tensors.keys() == tensors.keys()
        assert all(torch.equal(found.tensors[name], tensors[name]) for name in tensors)
    assert HERE.counts.origin_bytes - before == sum(
        each.size for each in bucket.objects.filter(Prefix="run/checkpoints/step-00000003")
    )
    store.storage.delete(3)
    store.storage.delete(4)
    assert store.steps() == [] and not list(bucket.objects.all())
