"""The tables of a ranking model, and the module that looks features up in them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from stoker.data.ranking.features import Column, Features
from stoker.data.ranking.ranking_block import RankingBlock, TableBlock
from stoker.errors import Problem, UserError
from stoker.hardware.cache_folder import cache_folder
from stoker.models.ranking.model_inputs import FIRST_ORDER, RankingShape
from stoker.runs.shared_secret import read_secret
from stoker.sockets import parse_address
from stoker.sparse.embeddings import Embeddings
from stoker.sparse.fused_tables import Feature
from stoker.sparse.servers import RowServers
from stoker.sparse.servers.served_rows import to_stderr
from stoker.sparse.sparse_embeddings import SparseEmbeddings
from stoker.sparse.table_settings import Admission, DiskTier, Eviction, TableSettings
from stoker.sparse.torchrec_embeddings import TorchRecEmbeddings

TORCHREC_ROWS = 100_000  # rows of a table whose job sets none


def shape_of(features: Features, block: RankingBlock, *, unpooled: bool) -> RankingShape:
    """Returns the shape that a model is built with.

    Args:
        unpooled: whether the model takes sequences as one vector per id; they need a feature that shares their table.
    """
    by_table: dict[str, str] = {}  # the feature whose own table it is, otherwise the first one
    for column in features.ids:
        if column.kind in ("id", "buckets") and (column.name == column.table or column.table not in by_table):
            by_table[column.table] = column.name
    apart = {
        c.name: by_table[c.table] for c in features.ids if unpooled and c.kind == "sequence" and c.table in by_table
    }
    other = {features[f.name].table: f.width for f in block.features if f.width and f.name in names_of(features)}
    widths = {c.name: width for c in features.ids if (width := other.get(c.table, block.width)) != block.width}
    return RankingShape(
        features=tuple(column.name for column in features.ids if column.name not in apart),
        sequences=apart,
        numbers=len(features.dense),
        width=block.width,
        labels=len(features.labels),
        item=tuple(block.item),
        hidden=tuple(block.hidden),
        experts=block.experts,
        layers=block.layers,
        levels=block.levels,
        widths=widths,
    )


def names_of(features: Features) -> set[str]:
    """Returns the features that are looked up in tables."""
    return {column.name for column in features.ids}


def misfit_of_widths(features: Features, block: RankingBlock) -> tuple[str, str, str] | None:
    """Returns (key, message, suggestion) of a width that a feature cannot have."""
    stated: dict[str, tuple[str, int]] = {}
    for index, feature in enumerate(block.features):
        if feature.width is None:
            continue
        key = f"ranking.features[{index}].width"
        if feature.name not in names_of(features):
            return key, f"{feature.name} is not a feature with ids, so it has no embedding", "remove `width`"
        table = features[feature.name].table
        name, width = stated.setdefault(table, (feature.name, feature.width))
        if width != feature.width:
            message = f"{feature.name} shares the rows of {name}, which have {width} numbers"
            return key, message, f"write `width: {width}`, or `table: {feature.name}` for a table of its own"
    return None


def tables_and_features(
    features: Features, shape: RankingShape, block: RankingBlock, *, first_order: bool, wide: bool
) -> tuple[list[TableSettings], dict[str, Feature]]:
    """Returns the tables of a model, and how features are looked up in them.

    Args:
        first_order: whether each feature has single weights beside its vectors.
        wide: whether all arithmetic is in float64.
    """
    tables: dict[str, TableSettings] = {}
    looked_up: dict[str, Feature] = {}
    for column in features.ids:
        looked_up[column.name] = _feature(column, column.table, apart=column.name in shape.sequences)
        tables.setdefault(column.table, _settings(column.table, shape.width_of(column.name), block.table, wide=wide))
        if first_order and column.name not in shape.sequences:
            name, table = column.name + FIRST_ORDER, column.table + FIRST_ORDER
            if any(other.name == name for other in features.ids):
                message = f"the rows have a column {name!r}, the name of the first-order weights of {column.name}"
                raise UserError(Problem(message, f"add {name} to `ranking.ignore`", key="ranking.model"))
            looked_up[name] = Feature(table, looked_up[column.name].pooling)
            tables.setdefault(table, _settings(table, 1, block.table, wide=wide))
    return list(tables.values()), looked_up


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
    servers: RowServers | None = None,
) -> Embeddings:
    """Builds the module that looks up a model's features.

    Args:
        group: processes that own the rows together.
        servers: servers that own the rows instead.

    Raises:
        CannotRun: the engine is not installed.
        UserError: the engine does not support what the model needs.
    """
    tables, looked_up = tables_and_features(features, shape, block, first_order=first_order, wide=wide)
    if block.engine == "torchrec":
        if apart := [name for name, feature in looked_up.items() if feature.pooling == "none"]:
            message = f"the model takes the ids of {apart[0]} one by one, and `engine: torchrec` gives their sums"
            raise UserError(Problem(message, "write `engine: stoker`", key="ranking.engine"))
        rows = dict.fromkeys((table.name for table in tables), block.table.rows or TORCHREC_ROWS)
        return TorchRecEmbeddings(tables, looked_up, rows=rows, seed=seed, group=group, device=device)
    dtype = torch.float64 if wide else torch.float32
    return SparseEmbeddings(tables, looked_up, seed=seed, group=group, device=device, dtype=dtype, servers=servers)


def servers_of(block: RankingBlock, base: Path, report: Callable[[str], None] = to_stderr) -> RowServers | None:
    """Returns the servers of a job's rows; None if the training processes store them.

    Args:
        report: see `RowServers`.

    Raises:
        UserError: the secret cannot be read.
    """
    wanted = block.servers
    if wanted is None:
        return None
    addresses = tuple(map(parse_address, wanted.addresses))
    return RowServers(addresses, read_secret(base / wanted.secret), wanted.staleness, wanted.patience, report)


def _feature(column: Column, table: str, *, apart: bool) -> Feature:
    if apart:
        return Feature(table, "none", column.longest)
    return Feature(table, "mean" if column.kind in ("ids", "sequence") and not column.weighted else "sum")


def _settings(name: str, width: int, block: TableBlock, *, wide: bool) -> TableSettings:
    new, old = block.admission, block.eviction
    admission = Admission(new.count, new.probability, new.cells) if new else None
    eviction = None
    if old:
        eviction = Eviction(
            old.age or 1, old.every, old.frequency, old.norm, old.max_rows, old.score, default_row=old.default_row
        )
    return TableSettings(
        name,
        width,
        optimizer=block.optimizer.replace("-", "_"),  # type: ignore[arg-type]
        lr=block.lr,
        eps=block.eps,
        initial=block.initial,
        betas=(block.beta1, block.beta2),
        ftrl_beta=block.ftrl_beta,
        l1=block.l1,
        l2=block.l2,
        weight_decay=block.weight_decay,
        dtype="float64" if wide else block.dtype,
        init_scale=block.init_scale,
        admission=admission,
        eviction=eviction,
        disk=DiskTier(cache_folder() / "rows", block.memory_rows) if block.memory_rows else None,
    )
