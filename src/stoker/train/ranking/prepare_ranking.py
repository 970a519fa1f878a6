"""Preparation of a job of task ranking: its log, its tower, its tables."""

from __future__ import annotations

import copy
import math
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stoker.checkpoint.object_collectives import run_on_all_ranks
from stoker.data.ranking.click_log import ClickLog
from stoker.data.ranking.column_files import in_words
from stoker.data.ranking.features import Features
from stoker.data.ranking.log_growth import growth_problem
from stoker.data.ranking.log_warnings import log_warnings
from stoker.data.ranking.ranking_block import IN_BATCH, RankingBlock
from stoker.data.ranking.recorded_features import FEATURES_FILE, record_of
from stoker.errors import UserError
from stoker.hardware.process_device import Device
from stoker.job.layout import layout_of
from stoker.job.load_job import LoadedJob
from stoker.job.resolved import ResolvedJob
from stoker.job.task_spec import block_of_task
from stoker.models.ranking.build import MODELS
from stoker.models.ranking.item_frequencies import ItemFrequencies
from stoker.models.ranking.model_inputs import RankingShape
from stoker.models.ranking.two_tower import TwoTower
from stoker.online_store.store_writers import scheme_of, writer_of
from stoker.parallel.apply_to_blocks import apply_to_blocks
from stoker.parallel.data_parallel.plain_module import spread_module
from stoker.parallel.mesh import Mesh
from stoker.sparse.embeddings import Embeddings
from stoker.sparse.servers import RowServers
from stoker.train.hooks import Hook
from stoker.train.module.import_object import call_import_path, import_path
from stoker.train.prepared import Prepared, describe_parameters, engine_of
from stoker.train.ranking.export_manifest import graph_from, manifest_of, table_entries
from stoker.train.ranking.exported_tower import GRAPH, WEIGHTS, graph_bytes
from stoker.train.ranking.in_batch_softmax import InBatchSoftmax
from stoker.train.ranking.job_log import open_log_of
from stoker.train.ranking.ranking_tables import TORCHREC_ROWS, embeddings_of, misfit_of_widths, servers_of, shape_of
from stoker.train.ranking.ranking_task import RankingTask
from stoker.train.ranking.resumed_features import features_to_resume
from stoker.train.ranking.saved_tables import SavedTables
from stoker.train.task import Part

NAMED = 3  # files with dropped rows that are named


def prepare_ranking(loaded: LoadedJob, device: Device, mesh: Mesh | None, base: Path) -> Prepared:
    """Builds log, tower and tables of a resolved job.

    Raises:
        UserError: the log cannot be used, or the model does not fit its features.
    """
    job, block = loaded.job, block_of_task(loaded.job, RankingBlock)
    if device.precision == "fp16":
        message = "this device computes in fp16, which scales the loss, and rows of tables are not scaled back"
        raise UserError(loaded.problem("train.precision", message, "write `precision: fp32`"))
    job = job.model_copy(update={"train": job.train.model_copy(update={"precision": device.precision})})
    log = open_log_of(loaded, base, training=True, features=features_to_resume(job, base))

    def report(line: str) -> None:
        task.note(line)  # the loop sets it

    with loaded.errors_at_their_keys():
        servers = servers_of(block, base, report)
    tower, tables, shape = build(loaded, log.features, device, mesh, servers)
    rows = job.evaluate.rows
    task = RankingTask(
        tower,
        tables,
        shape,
        log,
        seed=job.seed,
        at=block.at,
        in_order=block.progressive,
        evaluated=None if rows == "all" else rows,
        probabilities=block.gives_probabilities,
        softmax=softmax_of(tower, job, block, mesh),
        device=device.torch,
        dtype=dtype_of(device),
    )
    sync = sync_of(loaded, task, wide=device.precision == "fp64")
    parts = None
    if mesh is None:
        apply_to_blocks(tower, device.torch, layout_of(job), compiled=job.train.compile is True)
    else:
        with loaded.errors_at_their_keys():
            parts = spread_module(tower, mesh, compiled=job.train.compile is True, compute=device.autocast_dtype)
        assert parts.root is not None
        task.root = parts.root
    return Prepared(
        job,
        task,
        device,
        facts_of(log, block, tower, shape),
        log.fingerprints,
        engine_of(task, device, mesh, parts),
        parallel=parts,
        further=SavedTables(
            task, lambda: build(loaded, log.features, device, mesh, servers)[1], job.checkpoint.full_every
        ),
        hooks=(step_hook(lambda: task.tables, job.train.lr), *prefetch_hook(task), *sync),
        mesh=mesh,
        data_problem=lambda recorded: growth_problem(recorded, log),
        records={FEATURES_FILE: record_of(log.features)},
    )


def softmax_of(tower: nn.Module, job: ResolvedJob, block: RankingBlock, mesh: Mesh | None) -> InBatchSoftmax | None:
    """Returns the loss over the items of a step; None for a job with the cross entropy."""
    if block.loss != IN_BATCH:
        return None
    assert isinstance(tower, TwoTower)
    return InBatchSoftmax(tower, block.item[0], batch=job.train.batch, group=mesh.groups["batch"] if mesh else None)


def sync_of(loaded: LoadedJob, task: RankingTask, *, wide: bool) -> tuple[Hook, ...]:
    """Returns the hook that sends changes to the store of ``export.sync``; empty without one.

    Raises:
        UserError: the store cannot be opened, or processes of other hosts cannot write to it.
    """
    sync = loaded.job.export.sync
    if sync is None:
        return ()
    from stoker.train.ranking.export_sync import ExportSync

    with loaded.errors_at("export.sync.to"):
        is_local = scheme_of(sync.to) == "lmdb"
    if is_local and len(hosts := set(run_on_all_ranks(platform.node))) > 1:
        message = f"LMDB is a folder of one host, and the run has processes on {len(hosts)}"
        raise UserError(loaded.problem("export.sync.to", message, "write redis://HOST:PORT/DB"))
    with loaded.errors_at("export.sync.to"):
        writer = writer_of(sync.to)
    tower, features, shape = task.model, task.log.features, task.shape
    model, graph = block_of_task(loaded.job, RankingBlock).model, {}
    if ":" in model:
        manifest = manifest_of("", 0, loaded, features, tower, shape, wide=wide)
        graph = {GRAPH: graph_bytes(graph_from(copy.deepcopy(tower), shape, manifest))}

    def described(step: int) -> dict[str, Any]:
        found = manifest_of(Path(loaded.job.output).name, step, loaded, features, tower, shape, wide=wide)
        return found | {"files": sorted([WEIGHTS, *graph]), "tables": table_entries(task.tables, found)}

    follower = ExportSync(
        task,
        writer,
        manifest=described,
        files=lambda: graph,
        every_seconds=sync.every_seconds,
        every_steps=sync.every_steps,
    )
    return (follower.hook(),)


def build(
    loaded: LoadedJob,
    features: Features,
    device: Device,
    mesh: Mesh | None = None,
    servers: RowServers | None = None,
) -> tuple[nn.Module, Embeddings, RankingShape]:
    """Builds the initial tower and tables of a job.

    Args:
        servers: servers that store the rows.

    Raises:
        CannotRun: the engine of the tables is not installed.
        UserError: the model does not fit the features, or its code fails.
    """
    job, block = loaded.job, block_of_task(loaded.job, RankingBlock)
    own = ":" in block.model
    make: Any = import_path(block.model, "ranking.model", loaded) if own else MODELS[block.model]
    if problem := misfit_of_widths(features, block):
        raise UserError(loaded.problem(*problem))
    shape = shape_of(features, block, unpooled=bool(getattr(make, "unpooled", False)))
    if problem := _misfit(shape, block, features):
        raise UserError(loaded.problem(*problem))
    torch.manual_seed(job.seed)
    tower = call_import_path(block.model, "ranking.model", loaded, shape) if own else make(shape)
    if not isinstance(tower, nn.Module):
        message = f"ranking.model: {block.model} gives a {type(tower).__name__}, not a torch.nn.Module"
        raise UserError(loaded.problem("ranking.model", message))
    if block.loss == IN_BATCH and block.logq.enabled:
        tower.frequencies = ItemFrequencies(block.logq.cells, block.logq.rate)
    with loaded.errors_at_their_keys():
        tables = embeddings_of(
            features,
            shape,
            block,
            first_order=bool(getattr(tower, "first_order", False)),
            seed=job.seed,
            group=mesh.groups["batch"] if mesh else None,
            device=device.torch,
            wide=device.precision == "fp64",
            servers=servers,
        )
    return tower.to(device.torch, dtype_of(device)), tables, shape


def dtype_of(device: Device) -> torch.dtype:
    """Returns the dtype of parameters and numbers."""
    return torch.float64 if device.precision == "fp64" else torch.float32


def _misfit(shape: RankingShape, block: RankingBlock, features: Features) -> tuple[str, str, str] | None:
    """Returns (key, message, suggestion) of a setting that the model cannot be built with."""
    names = [*shape.features, *shape.sequences]
    if not names:
        return "ranking.features", "no feature has ids, so there is nothing to look up", "write `kind: id` for one"
    if missing := [name for name in shape.item if name not in shape.features]:
        hint = f"these are {', '.join(shape.features)}"
        if missing[0] in [column.name for column in features.dense]:
            hint = f"write `features: [{{name: {missing[0]}, kind: buckets}}]`"
        return "ranking.item", f"{missing[0]} is not a feature with ids", hint
    if block.model == "dlrm" and len(shape.features) + (shape.numbers > 0) < 2:
        message = f"dlrm multiplies pairs of vectors, and there is one: {shape.features[0]}"
        return "ranking.model", message, "write `model: deepfm` or `model: dcn`"
    if block.model == "two-tower":
        return _misfit_of_towers(shape, features)
    if block.model == "din" and not shape.sequences:
        message = "`model: din` needs a sequence that shares the table of the row's item"
        return "ranking.model", message, "write `features: [{name: history, kind: sequence, table: item_id}]`"
    return None


def _misfit_of_towers(shape: RankingShape, features: Features) -> tuple[str, str, str] | None:
    if features[shape.item[0]].kind != "id":
        message = f"{shape.item[0]} has several ids a row, and two-tower finds items by one"
        return "ranking.item", message, "name the item's id first"
    if set(shape.item) >= set(shape.features) and not shape.numbers:
        return "ranking.item", "every feature is the item's, and none is left for the user", "leave some out"
    return None


def step_hook(tables: Callable[[], Embeddings], peak: float) -> Hook:
    """Returns the hook that steps the tables with the optimizer, at their own rate on the same schedule.

    A step with a row gradient that is not finite is skipped as a whole. The tables count the run's steps: a repeated
    step counts once, and a skipped step counts as an empty one.

    Args:
        tables: returns the run's current tables.
        peak: peak learning rate of the schedule.
    """

    def check(_step: int, total: Tensor) -> Tensor:
        return total if tables().gradients_are_finite() else total * math.nan

    def apply(lr: float, taken: bool) -> None:
        if taken:
            tables().apply_gradients(lr_factor=lr / peak)
        else:
            tables().discard()

    return Hook(
        before_passes=lambda step: tables().end_empty_steps(step - 1), after_passes=check, after_optimizer=apply
    )


def prefetch_hook(task: RankingTask) -> tuple[Hook, ...]:
    """Returns the hook that prefetches rows from files for the next step; empty if no rows are in files."""
    if all(table.disk is None for table in task.tables.tables):
        return ()

    def prefetch(parts: Sequence[Part]) -> None:
        task.tables.prefetch(*map(task.ids_of, parts))

    return (Hook(coming=prefetch),)


def facts_of(log: ClickLog, block: RankingBlock, tower: nn.Module, shape: RankingShape) -> dict[str, str]:
    """Returns the facts that are printed before training starts."""
    features = log.features
    held_out = f"{len(log.held_out):,} held out, the latest" if log.held_out else "none held out"
    order = f"in order of {features.time}" if features.time else "in the order of the files"
    tables = len({column.table for column in features.ids})
    widths = sorted({shape.width_of(column.name) for column in features.ids})
    sizes = f"of {' to '.join(map(str, dict.fromkeys((widths[0], widths[-1]))))} a row"
    if block.engine == "torchrec":
        sizes += f", {block.table.rows or TORCHREC_ROWS:,} rows each by TorchRec, to which ids are hashed"
    lost = {name: part for store in log.stores for name, part in store.summary.parts.items() if part.dropped}
    newest = [f"{Path(name).name}: {in_words(part.reasons)}" for name, part in lost.items()][-NAMED:]
    dropped = f"{sum(part.dropped for part in lost.values()):,} rows, the last of them in {'; '.join(newest)}"
    return {
        "model": f"{block.model}: {describe_parameters(tower)} beside the tables",
        "features": f"{len(features.dense)} numbers, {len(features.ids)} with ids in {tables} tables {sizes}",
        "rows": f"{len(log.training):,} to train on, {held_out}; {order}",
        **({"dropped": dropped} if lost else {}),
        **({"warnings": "; ".join(warnings)} if (warnings := log_warnings(log, block.item)) else {}),
    }
