"""Manifest of an exported ranking model: all that a reader needs beside the rows."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from stoker.data.ranking.features import Features
from stoker.data.ranking.ranking_block import NAMES, RankingBlock
from stoker.job.load_job import LoadedJob
from stoker.job.task_spec import block_of_task
from stoker.models.ranking.model_inputs import RankingShape
from stoker.online_store.row_backends import FORMAT
from stoker.sparse.embeddings import Embeddings
from stoker.sparse.fused_tables import Feature
from stoker.train.ranking.exported_tower import graph_of
from stoker.train.ranking.ranking_tables import tables_and_features


def manifest_of(
    run: str, step: int, loaded: LoadedJob, features: Features, tower: nn.Module, shape: RankingShape, *, wide: bool
) -> dict[str, Any]:
    """Returns the manifest of an export; row counts and file names are added later.

    Args:
        run: the run's name.
        wide: whether all arithmetic is in float64.
    """
    block = block_of_task(loaded.job, RankingBlock)
    first_order = bool(getattr(tower, "first_order", False))
    tables, looked_up = tables_and_features(features, shape, block, first_order=first_order, wide=wide)
    return {
        "format": FORMAT,
        "run": run,
        "step": step,
        "made": round(time.time(), 3),
        "id": secrets.token_hex(8),
        "updates": 0,
        "model": block.model,
        "probabilities": block.gives_probabilities,
        "own": block.model not in NAMES,
        "first_order": first_order,
        "precision": "fp64" if wide else "fp32",
        "shape": asdict(shape),
        "features": features.as_json(),
        "outputs": list(features.outputs),
        "ignored": list(block.ignore),
        "looked_up": {name: [f.table, f.pooling, f.longest] for name, f in looked_up.items()},
        "tables": [{"name": t.name, "width": t.width, "dtype": t.dtype} for t in tables],
        "files": [],
    }


def table_entries(tables: Embeddings, manifest: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the tables of a manifest, with the current default rows of unknown ids."""
    rows = tables.default_rows()
    return [
        entry | ({"default": rows[entry["name"]].tolist()} if rows[entry["name"]].any() else {})
        for entry in manifest["tables"]
    ]


def graph_from(tower: nn.Module, shape: RankingShape, manifest: dict[str, Any]) -> torch.export.ExportedProgram:
    """Exports the graph of a tower that looks its features up as the manifest says; see `graph_of`."""
    looked_up = {name: Feature(*entry) for name, entry in manifest["looked_up"].items()}
    widths = {entry["name"]: entry["width"] for entry in manifest["tables"]}
    return graph_of(tower, shape, looked_up, {name: widths[feature.table] for name, feature in looked_up.items()})
