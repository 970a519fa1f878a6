"""Writes tables as sorted shards in safetensors files, with a manifest."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors.numpy import save_file

from stoker.online_store.export_digests import KEY, digests_of
from stoker.online_store.row_backends import STORED_TYPES
from stoker.online_store.store_version import TableDelta

SHARD_ROWS = 1 << 20


def write_shards(
    folder: Path, parts: Iterable[TableDelta], manifest: Mapping[str, Any], files: Mapping[str, bytes]
) -> None:
    """Writes an export.

    Args:
        parts: rows of all tables, a shard each; those of a table ordered by id.
        manifest: to which the shards of each table and the digests of all files are added.
        files: further files to write.
    """
    shards: dict[int, list[dict[str, Any]]] = {number: [] for number in range(len(manifest["tables"]))}
    for part in parts:
        if not len(part.ids):
            continue
        own = shards[part.table.number]
        name = f"tables/{part.table.number:03d}/{len(own):05d}.safetensors"
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        save_file({"ids": part.ids, "rows": part.rows.view(STORED_TYPES[part.table.dtype])}, folder / name)
        own.append({"file": name, "rows": len(part.ids), "first": int(part.ids[0]), "last": int(part.ids[-1])})
    for name, content in files.items():
        (folder / name).write_bytes(content)
    tables = [{**entry, "shards": shards[number]} for number, entry in enumerate(manifest["tables"])]
    names = [*files, *(shard["file"] for own in shards.values() for shard in own)]
    whole = {**manifest, "tables": tables, KEY: digests_of(folder, names)}
    (folder / "manifest.json").write_text(json.dumps(whole, indent=1), encoding="utf-8")
