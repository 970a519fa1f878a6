"""Rows of embedding tables by id, joined from the parts and increments of a checkpoint that was read whole."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from stoker.checkpoint.tensor_names import BASE_ROWS, ROWS

BY_ROW = ("ids", "values", "optimizer", "seen", "last")


def rows_by_id(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns ``TABLE/COLUMN`` of every table, sorted by id; independent of the saving processes and their parts.

    Counters of ids without a row are sorted by bucket. The number of evicted ids is the same for all processes.
    """
    found: dict[str, Tensor] = {}
    before, own = _columns(tensors, BASE_ROWS), _columns(tensors, ROWS)
    for table in sorted(before.keys() | own.keys()):
        base, since = before.get(table, {}), own.get(table, {})
        none = torch.empty(0, dtype=torch.int64)
        gone = torch.cat([since.get("removed", none), since.get("ids", none)])
        kept = ~torch.isin(base.get("ids", none), gone)
        ids = torch.cat([base.get("ids", none)[kept], since.get("ids", none)])
        order = ids.argsort()
        for name in BY_ROW:
            parts = [*([base[name][kept]] if name in base else []), *([since[name]] if name in since else [])]
            if parts:
                found[f"{table}/{name}"] = torch.cat(parts)[order]
        counters = since if "buckets" in since else base
        if "buckets" in counters:
            order = counters["buckets"].argsort()
            found |= {f"{table}/{name}": counters[name][order] for name in ("buckets", "sketch")}
        if evicted := [part["evicted"][-1:] for part in (base, since) if "evicted" in part]:
            found[f"{table}/evicted"] = evicted[-1]
    return found


def _columns(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, dict[str, Tensor]]:
    """Concatenates the parts of all processes, by table and column."""
    parts: dict[str, dict[str, list[Tensor]]] = {}
    for name, tensor in sorted(tensors.items()):
        if name.startswith(prefix):
            table, _, column = name.removeprefix(prefix).partition("/")[2].rpartition("/")
            parts.setdefault(table, {}).setdefault(column, []).append(tensor)
    return {table: {name: torch.cat(some) for name, some in columns.items()} for table, columns in parts.items()}
