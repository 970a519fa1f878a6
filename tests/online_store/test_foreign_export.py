"""An export of a ranking model that comes from other people: it names no file outside, and damage is a StoreError."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stoker.online_store.export_digests import check_files
from stoker.online_store.row_backends import StoredTable, StoreError
from stoker.online_store.row_reader import RowReader
from stoker.online_store.shard_writer import write_shards
from stoker.online_store.store_version import TableDelta

IDS = np.array([1, 5, 9], np.int64)
SHARD = "tables/000/00000.safetensors"


@pytest.fixture
def export(tmp_path: Path) -> Path:
    """An export with one table of three rows, beside a file that is not part of it."""
    (tmp_path / "secret").write_bytes(b"secret")
    table = StoredTable(0, "users", 2, "float32")
    rows = np.arange(6, dtype=np.float32).reshape(3, 2).view(np.uint8)
    entry = {"name": "users", "width": 2, "dtype": "float32"}
    whole = {"format": 1, "tables": [entry], "updates": 0, "run": "run", "step": 7, "made": 1.5}
    folder = tmp_path / "export"
    folder.mkdir()
    write_shards(folder, [TableDelta(table, IDS, rows, np.empty(0, np.int64))], whole, {"tower": b"bytes"})
    return folder


def _change(export: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    manifest = json.loads((export / "manifest.json").read_text())
    change(manifest)
    (export / "manifest.json").write_text(json.dumps(manifest))


def _read(export: Path) -> Any:
    reader = RowReader(str(export))
    check_files(export, reader.manifest)
    return reader.rows({"users": IDS})["users"]


def test_an_export_is_read(export: Path) -> None:
    assert _read(export).tolist() == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize("name", ["/dev/zero", "../secret", "tables/../../secret", "fifo", "tables", "absent", "a\0b"])
def test_a_digest_is_of_a_regular_file_inside(export: Path, name: str) -> None:
    os.mkfifo(export / "fifo")
    _change(export, lambda manifest: manifest["sha256"].update({name: "x"}))
    with pytest.raises(StoreError, match=r"outside of its folder|cannot be read|not a regular file"):
        _read(export)


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd"])
def test_shards_and_files_are_inside(export: Path, name: str) -> None:
    _change(export, lambda manifest: manifest["tables"][0]["shards"][0].update(file=name))
    with pytest.raises(StoreError, match="outside of its folder"):
        _read(export)
    with pytest.raises(StoreError, match="outside of its folder"):
        RowReader(str(export)).file(name)


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m["tables"][0]["shards"][0].pop("first"),
        lambda m: m["tables"][0]["shards"][0].update(file=7),
        lambda m: m["tables"][0].update(width=3),
        lambda m: m["tables"][0].update(width=-1),
        lambda m: m["tables"][0].update(width=1 << 50),
        lambda m: m["tables"][0].update(width="2"),
        lambda m: m["tables"][0].update(dtype="object"),
        lambda m: m["tables"][0].update(default=[1.0]),
        lambda m: m["tables"].append(7),
        lambda m: m.update(sha256=[SHARD]),
    ],
)
def test_a_damaged_manifest_is_an_error_of_the_store(export: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    _change(export, change)
    with pytest.raises(StoreError, match="damaged"):
        _read(export)


@pytest.mark.parametrize("text", ["[7]", "7", "[" * 100_000, "{"])
def test_a_manifest_that_is_no_object_is_no_export(export: Path, text: str) -> None:
    (export / "manifest.json").write_text(text)
    with pytest.raises(StoreError, match="is not an export"):
        RowReader(str(export))


def _header(ids: list[int], rows: list[int]) -> bytes:
    text = json.dumps({"ids": {"data_offsets": ids}, "rows": {"data_offsets": rows}}).encode()
    return len(text).to_bytes(8, "little") + text


@pytest.mark.parametrize(
    "content",
    [
        b"\xff" * 7 + b"\x7f" + b"{}",
        b"",
        _header([0, 24], [24, 1 << 60]) + bytes(48),
        _header([0, 16], [24, 48]) + bytes(48),
        _header([0, 0], [0, 0]) + bytes(48),
        _header([-8, 16], [24, 48]) + bytes(48),
        (100_000).to_bytes(8, "little") + b"[" * 100_000,
    ],
)
def test_a_damaged_shard_is_an_error_of_the_store(export: Path, content: bytes) -> None:
    _change(export, lambda manifest: manifest["sha256"].clear())
    (export / SHARD).write_bytes(content)
    with pytest.raises(StoreError, match="damaged"):
        _read(export)


def test_a_file_with_other_contents_is_refused(export: Path) -> None:
    _read(export)
    for name in ("tower", SHARD):
        whole = (export / name).read_bytes()
        (export / name).write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        with pytest.raises(StoreError, match=f"{name} has other contents than were exported"):
            _read(export)
        (export / name).write_bytes(whole)


def test_a_later_format_is_refused(export: Path) -> None:
    _change(export, lambda manifest: manifest.update(format=3))
    with pytest.raises(StoreError, match="has format 3, and this reader reads 1 and 2"):
        _read(export)
