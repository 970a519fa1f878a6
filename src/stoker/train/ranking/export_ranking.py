"""Exports of ranking models: the tower beside its tables, in a folder of sorted shards, in LMDB or in Redis.

A version is written where no reader sees it, read back, and replayed in a fresh process; then it becomes the current
one.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stoker.data.ranking.click_log import RowSet
from stoker.data.ranking.log_batch import RowBatch
from stoker.data.ranking.ranking_block import RankingBlock
from stoker.data.ranking.recorded_features import features_of_run
from stoker.errors import RunFailed, UserError
from stoker.files import check_new_folder
from stoker.hardware.process_device import Device
from stoker.job.load_job import LoadedJob
from stoker.job.task_spec import block_of_task
from stoker.models.tuning.quantise import device_for
from stoker.online_store.row_backends import tables_of
from stoker.online_store.row_reader import RowReader
from stoker.online_store.shard_writer import SHARD_ROWS, write_shards
from stoker.online_store.store_version import TableDelta
from stoker.online_store.store_writers import StoreWriter, keep_newest, scheme_of, shown_place, store_errors, writer_of
from stoker.parallel.float64_mode import arithmetic_of
from stoker.runs.run_folder import RunFolder
from stoker.sparse.embeddings import Embeddings
from stoker.sparse.stored_embeddings import stored_rows, stored_tables
from stoker.sparse.value_format import RowFormat
from stoker.train.ranking.export_manifest import graph_from, manifest_of, table_entries
from stoker.train.ranking.exported_tower import GRAPH, ONNX, WEIGHTS, graph_bytes, onnx_bytes, weights_of
from stoker.train.ranking.job_log import open_log_of
from stoker.train.ranking.open_run import open_job, restored_task
from stoker.train.ranking.ranking_task import RankingTask
from stoker.train.ranking.replay_export import compare, replay_afresh
from stoker.train.single_process import SingleProcess

REPLAYED = 1024  # rows scored in the replay
READ_BACK = 1 << 16  # rows read back per part of a table
NOTHING = np.empty(0, np.int64)


@dataclass(frozen=True)
class RankingExport:
    """Result of an export.

    Attributes:
        written: the folder or URL.
        version: version in a store; None for a folder.
        rows: rows of each table.
        lines: results of reading back and replaying.
        warning: why there is no ONNX file; empty if there is one.
    """

    written: str
    step: int
    version: int | None
    rows: dict[str, int]
    lines: tuple[str, ...]
    warning: str = ""


def export_ranking(
    run: str, to: str, *, at: str, trusted: Sequence[str], base: Path, keep: int, say: Callable[[str], None]
) -> tuple[RunFolder, RankingExport]:
    """Exports a run and replays it.

    Args:
        to: a folder, ``lmdb://PATH`` or ``redis://HOST:PORT/DB``.
        keep: older versions to keep in a store beside the current one.
        say: called with the name of each stage when it begins.

    Raises:
        UserError: the target exists, or cannot be written.
        RunFailed: the written export does not score as the run does; it does not become current.
    """
    is_folder = not scheme_of(to)
    if is_folder:
        check_new_folder(base / to)
    writer = None if is_folder else writer_of(to)
    folder, loaded = open_job(run, trusted, base)
    if block_of_task(loaded.job, RankingBlock).engine != "stoker":
        message = "an export has rows by their ids, and `engine: torchrec` numbers them by hashes"
        raise UserError(
            loaded.problem("ranking.engine", message, "train with `engine: stoker`, or serve the run itself")
        )
    say(f"opening {run}")
    features, device = features_of_run(folder), device_for(loaded.job)
    log = open_log_of(loaded, base, features=features)
    rows = log.held_out or log.training
    with arithmetic_of(device):
        task, step = restored_task(folder, loaded, features, rows, device, at, base)
        say("computing the run's own scores")
        expected, some = _reference(task, rows, device)
        manifest, files, warning = _described(folder, loaded, task, device, step)
    batch = some.batch(np.arange(len(some)))

    def verify(place: str, version: int | None) -> tuple[str, ...]:
        say("comparing what a fresh process computes from it")
        return _verified(task, place, version, batch, expected)

    say(f"writing ranking to {to if writer is None else shown_place(to)}")
    if writer is None:
        lines = _to_folder(task, manifest, files, base / to, lambda place: verify(place, None))
        return folder, RankingExport(str(base / to), step, None, task.tables.rows, lines, warning)
    with store_errors(to):
        version, lines = _to_store(task, manifest, files, writer, lambda version: verify(to, version))
        keep_newest(writer, keep)
    return folder, RankingExport(shown_place(to), step, version, task.tables.rows, lines, warning)


def _reference(task: RankingTask, rows: RowSet, device: Device) -> tuple[np.ndarray, RowSet]:
    """Returns the run's own logits of evenly spaced rows, and these rows."""
    spaced = np.unique(np.arange(min(REPLAYED, len(rows))) * len(rows) // max(1, min(REPLAYED, len(rows))))
    some = replace(rows, rows=rows.rows[spaced])
    exact = replace(device, precision="fp32") if device.precision == "bf16" else device  # serving computes in float32
    _, scored = task.score(some, SingleProcess(task, exact, ()))
    return scored.logits, some


def _described(
    folder: RunFolder, loaded: LoadedJob, task: RankingTask, device: Device, step: int
) -> tuple[dict[str, Any], dict[str, bytes], str]:
    """Returns (manifest, files, why there is no ONNX) of a run."""
    tower, features, shape = task.model, task.log.features, task.shape
    manifest = manifest_of(folder.path.name, step, loaded, features, tower, shape, wide=device.precision == "fp64")
    program = graph_from(tower, shape, manifest)
    files = {WEIGHTS: weights_of(tower), GRAPH: graph_bytes(program)}
    onnx, why = onnx_bytes(program)
    if onnx is not None:
        files[ONNX] = onnx
    rows = task.tables.rows
    tables = [{**entry, "rows": rows[entry["name"]]} for entry in table_entries(task.tables, manifest)]
    return {**manifest, "tables": tables, "files": sorted(files)}, files, why and f"no {ONNX}: {why}"


def _parts(tables: Embeddings) -> Iterator[TableDelta]:
    """Yields all rows, table by table, each sorted by id."""
    numbers = stored_tables(tables.tables)
    for part in tables.parts(rows=SHARD_ROWS):
        for name, state in part.tables.items():
            yield TableDelta(numbers[name], *stored_rows(state), NOTHING)


def _to_folder(
    task: RankingTask,
    manifest: Mapping[str, Any],
    files: Mapping[str, bytes],
    to: Path,
    verify: Callable[[str], tuple[str, ...]],
) -> tuple[str, ...]:
    to.parent.mkdir(parents=True, exist_ok=True)
    partial = to.with_name(f".{to.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        try:
            partial.mkdir()
            write_shards(partial, _parts(task.tables), manifest, files)
        except OSError as error:
            raise RunFailed(f"the export could not be written to {to}: {error.strerror or error}") from error
        try:
            lines = verify(str(partial))
        except RunFailed as error:
            differs = to.with_name(f"{to.name}.differs")
            shutil.rmtree(differs, ignore_errors=True)
            partial.rename(differs)
            raise RunFailed(f"{error}; the written files are in {differs}") from error
        if to.exists():
            to.rmdir()  # empty, as checked
        partial.rename(to)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return lines


def _to_store(
    task: RankingTask,
    manifest: Mapping[str, Any],
    files: Mapping[str, bytes],
    writer: StoreWriter,
    verify: Callable[[int], tuple[str, ...]],
) -> tuple[int, tuple[str, ...]]:
    version = writer.begin()
    try:
        for delta in _parts(task.tables):
            writer.put(version, delta)
        writer.seal(version, manifest, files)
        lines = verify(version)
        for name, table in tables_of(manifest).items():
            if (there := writer.rows_of(version, table)) != manifest["tables"][table.number]["rows"]:
                raise RunFailed(f"table {name!r} has {there:,} rows in the store, and other rows in the run")
    except BaseException:
        writer.drop(version)
        raise
    writer.switch(version)
    return version, lines


def _verified(
    task: RankingTask, place: str, version: int | None, batch: RowBatch, expected: np.ndarray
) -> tuple[str, ...]:
    """Reads rows back and replays the tower on them.

    Raises:
        RunFailed: rows or scores differ from the run's.
    """
    reader, rows = RowReader(place, version=version), 0
    formats = {t.name: RowFormat(t.dtype, t.width) for t in task.tables.tables}
    for part in task.tables.parts(rows=SHARD_ROWS):
        for name, state in part.tables.items():
            some = torch.from_numpy(np.unique(np.linspace(0, max(0, len(state.ids) - 1), READ_BACK).astype(np.int64)))
            some = some[: len(state.ids)]
            back = reader.rows({name: state.ids[some].numpy()})[name]
            if not np.array_equal(back, formats[name].decode(state.values[some]).numpy()):
                raise RunFailed(f"rows of table {name!r} are others when they are read back")
            rows += len(some)
    line = compare(replay_afresh(place, version, batch), expected, reader.manifest["precision"])
    return f"read {rows:,} rows back: bitwise equal", line
