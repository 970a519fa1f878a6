"""Sources at URLs: the rows, tokens and splits of the same files here, read while they are downloaded."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from counting_origin import CountingOrigin

from stoker.data.build_cache import find_format
from stoker.data.files.readers import decode
from stoker.data.files.rows import Raw
from stoker.data.sources import Source, open_source, source_problem
from stoker.errors import UserError
from stoker.job.blocks.source_block import SourceBlock
from stoker.node_cache.object_cache import node_cache


@pytest.fixture
def origin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CountingOrigin]:
    monkeypatch.setenv("STOKER_CACHE", str(tmp_path / "cache"))
    with CountingOrigin() as served:
        yield served


def opened(path: str, split: str | None = None) -> Source:
    return open_source(SourceBlock(path=path, split=split), Path("/nowhere"))


def values(source: Source) -> list[Any]:
    return [(row.row, decode(row)) if isinstance(row, Raw) else row for row in source.rows()]


KINDS = ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.json", "a.csv", "a.txt", "a.parquet", "a.parquet.gz"]


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_file_gives_the_same_rows_as_here(name: str, tmp_path: Path, origin: CountingOrigin) -> None:
    rows = [{"text": f"row {number} " + "x" * 90} for number in range(3000)]
    file = tmp_path / name
    _write(file, rows)
    origin.objects[name] = file.read_bytes()
    here = open_source(SourceBlock(path=name), tmp_path)
    there = opened(f"{origin.url}/{name}")
    assert values(there) == values(here) and there.size_bytes == here.size_bytes
    assert values(there) and origin.sent == {name: here.size_bytes}


def _write(file: Path, rows: list[dict[str, str]]) -> None:
    import gzip

    import pyarrow as pa
    import pyarrow.parquet as pq
    import zstandard

    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    plain = {
        ".jsonl": lines,
        ".json": json.dumps(rows).encode(),
        ".csv": b"text\n" + b"".join(row["text"].encode() + b"\n" for row in rows),
        ".txt": lines,
    }
    suffixes = file.suffixes
    if suffixes[0] == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), file)
        data = file.read_bytes()
    else:
        data = plain[suffixes[0]]
    if suffixes[-1] == ".gz":
        data = gzip.compress(data)
    if suffixes[-1] == ".zst":
        data = zstandard.ZstdCompressor().compress(data)
    file.write_bytes(data)


def line(text: str) -> bytes:
    return json.dumps({"text": text}).encode() + b"\n"


def test_a_range_of_shards_is_read_in_its_order(origin: CountingOrigin) -> None:
    for number in (10, 9, 8):
        origin.objects[f"s-{number:02d}.jsonl"] = line(str(number))
    source = opened(f"{origin.url}/s-{{08..10}}.jsonl")
    assert [value["text"] for _, value in values(source)] == ["8", "9", "10"]


def test_a_folder_in_a_store_with_its_splits() -> None:
    """A store of this process' memory, with listings."""
    import fsspec

    system = fsspec.filesystem("memory")
    for name in ("train/b.jsonl", "train/a.jsonl", "test/c.jsonl", "README.md", "x.bin"):
        system.pipe_file(f"/bucket/data/{name}", line(name))
    try:
        assert [v["text"] for _, v in values(opened("memory://bucket/data/"))] == [
            *("test/c.jsonl", "train/a.jsonl", "train/b.jsonl"),
        ]
        assert [v["text"] for _, v in values(opened("memory://bucket/data", "train"))] == [
            *("train/a.jsonl", "train/b.jsonl"),
        ]
        assert [v["text"] for _, v in values(opened("memory://bucket/data/*/*.jsonl", "test"))] == ["test/c.jsonl"]
        with pytest.raises(UserError, match="no file of split 'validation'"):
            opened("memory://bucket/data/", "validation")
        with pytest.raises(UserError, match="no object fits memory://bucket/data/z"):
            opened("memory://bucket/data/z*.jsonl")
        with pytest.raises(UserError, match="unknown kind of file: memory://bucket/data/x"):
            opened("memory://bucket/data/x.bin")
    finally:
        system.rm("/bucket", recursive=True)


def test_a_slice_moves_no_more_than_it_needs(origin: CountingOrigin) -> None:
    origin.objects["x.jsonl"] = line("a" * 100) * 600_000
    source = opened(f"{origin.url}/x.jsonl", "[:10]")
    assert len(values(source)) == 10 and find_format(source, {}) == "text"
    assert origin.total < source.size_bytes / 2


def test_broken_rows_name_the_url_without_its_signature(origin: CountingOrigin) -> None:
    origin.objects["x.jsonl"] = line("good") + b"{broken\n"
    rows = values(opened(f"{origin.url}/x.jsonl?sig=geheim"))
    assert rows[0][0] == 1 and rows[1][0] == 2
    raws = list(opened(f"{origin.url}/x.jsonl?sig=geheim").rows())
    assert raws[1].source == f"{origin.url}/x.jsonl"


def test_the_fingerprint_changes_with_the_content(origin: CountingOrigin, monkeypatch: pytest.MonkeyPatch) -> None:
    from stoker.node_cache import object_cache

    monkeypatch.setattr(object_cache, "FRESH", -1.0)
    origin.objects["x.jsonl"] = line("one")
    first = opened(f"{origin.url}/x.jsonl").fingerprint()
    assert opened(f"{origin.url}/x.jsonl").fingerprint() == first
    origin.objects["x.jsonl"] = line("two")
    assert opened(f"{origin.url}/x.jsonl").fingerprint() != first
    assert origin.total == 0  # the origin's tag says it


def test_without_a_tag_the_content_itself_is_the_fingerprint(origin: CountingOrigin, tmp_path: Path) -> None:
    origin.tags["x.jsonl"] = " "
    origin.objects["x.jsonl"] = line("one")
    (tmp_path / "x.jsonl").write_bytes(line("one"))
    away, here = opened(f"{origin.url}/x.jsonl"), open_source(SourceBlock(path="x.jsonl"), tmp_path)
    assert away.fingerprint() == here.fingerprint()
    assert next(node_cache().entries()).is_whole


def test_problems_that_need_no_network() -> None:
    def problem(path: str) -> tuple[str, str] | None:
        return source_problem(SourceBlock(path=path), Path("/nowhere"))

    assert problem("https://nowhere.invalid/x.jsonl") is None
    assert problem("s4://b/x.jsonl") == ("there is no kind of store s4:// (s4://b/x.jsonl)", "did you mean s3://?")
    assert "leads to another URL" in (problem("simplecache::https://h/x.jsonl") or ("",))[0]
