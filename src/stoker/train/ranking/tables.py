"""The tables of a ranking model: which there are, and the module that looks features up in them."""

from __future__ import annotations

import torch
import torch.distributed as dist

from stoker.data.ranking.features import Column, Features
from stoker.models.ranking.shape import FIRST_ORDER, RankingShape
from stoker.sparse.embeddings import Feature, SparseEmbeddings
from stoker.sparse.table_settings import Admission, Eviction, TableSettings
from stoker.train.ranking.block import RankingBlock, TableBlock


def shape_of(features: Features, block: RankingBlock, *, unpooled: bool) -> RankingShape:
    """What a model is built for.

    Args:
        unpooled: whether the model takes sequences as a vector an id; they need a feature whose table they share.
    """
    by_table = {c.table: c.name for c in features.ids if c.kind in ("id", "buckets")}
    apart = {
        c.name: by_table[c.table] for c in features.ids if unpooled and c.kind == "sequence" and c.table in by_table
    }
    return RankingShape(
        tuple(column.name for column in features.ids if column.name not in apart),
        apart,
        len(features.dense),
        block.width,
        len(features.labels),
        tuple(block.item),
        tuple(block.hidden),
        block.experts,
        block.layers,
    )


def embeddings_of(
    features: Features,
    shape: RankingShape,
    block: RankingBlock,
    *,
    first_order: bool,
    seed: int,
    group: dist.ProcessGroup | None,
    device: torch.device,
    wide: bool,
) -> SparseEmbeddings:
    """The tables of a model.

    Args:
        first_order: whether each feature has single weights beside its vectors.
        group: the processes that own the rows together.
        wide: whether all arithmetic is in float64.
    """
    tables: dict[str, TableSettings] = {}
    looked_up: dict[str, Feature] = {}
    for column in features.ids:
        looked_up[column.name] = _feature(column, column.table, apart=column.name in shape.sequences)
        tables.setdefault(column.table, _settings(column.table, block.width, block.table, wide=wide))
        if first_order and column.name not in shape.sequences:
            name = column.table + FIRST_ORDER
            looked_up[column.name + FIRST_ORDER] = Feature(name, looked_up[column.name].pooling)
            tables.setdefault(name, _settings(name, 1, block.table, wide=wide))
    dtype = torch.float64 if wide else torch.float32
    return SparseEmbeddings(list(tables.values()), looked_up, seed=seed, group=group, device=device, dtype=dtype)


def _feature(column: Column, table: str, *, apart: bool) -> Feature:
    if apart:
        return Feature(table, "none", column.longest)
    return Feature(table, "mean" if column.kind in ("ids", "sequence") and not column.weighted else "sum")


def _settings(name: str, width: int, block: TableBlock, *, wide: bool) -> TableSettings:
    new, old = block.admission, block.eviction
    admission = Admission(new.count, new.probability, new.cells) if new else None
    eviction = Eviction(old.age, old.every, old.frequency, old.norm) if old else None
    return TableSettings(
        name,
        width,
        optimizer=block.optimizer.replace("-", "_"),  # type: ignore[arg-type]
        lr=block.lr,
        eps=block.eps,
        initial=block.initial,
        l1=block.l1,
        l2=block.l2,
        weight_decay=block.weight_decay,
        dtype="float64" if wide else block.dtype,
        init_scale=block.init_scale,
        admission=admission,
        eviction=eviction,
    )
