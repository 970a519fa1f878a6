"""Opening and evaluation of a trained ranking model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from stoker.checkpoint.load_run import checkpoint_step, state_at
from stoker.checkpoint.run_weights import AVERAGE, restore_weights
from stoker.data.ranking.click_log import ClickLog, RowSet, open_rows
from stoker.data.ranking.features import Features
from stoker.data.ranking.ranking_block import RankingBlock
from stoker.data.ranking.recorded_features import features_of_run
from stoker.errors import Problem, UserError
from stoker.hardware.process_device import Device
from stoker.job.load_job import LoadedJob, load_job
from stoker.job.resolved import ResolvedSource
from stoker.job.task_spec import block_of_task
from stoker.job.trust import code_problems
from stoker.models.ranking.model_inputs import RankingShape
from stoker.models.ranking.two_tower import TwoTower
from stoker.models.tuning.quantise import device_for
from stoker.parallel.float64_mode import arithmetic_of
from stoker.runs.find_run import find_run
from stoker.runs.run_folder import RunFolder
from stoker.sparse.embeddings import Embeddings
from stoker.train.ranking.evaluation_metrics import RankingFigures, figures_of
from stoker.train.ranking.job_log import open_log_of
from stoker.train.ranking.prepare_ranking import build, dtype_of
from stoker.train.ranking.progressive import over_periods, read_periods
from stoker.train.ranking.ranking_batch import RankingBatch
from stoker.train.ranking.ranking_task import RankingTask
from stoker.train.ranking.retrieval import Retrieval, retrieval_figures
from stoker.train.ranking.saved_tables import ArrivingRows
from stoker.train.single_process import SingleProcess

TRUSTED = "model.trust_remote_code=true"


def measure_run(
    path: str, data: str | None, form: str, *, at: str, trusted: Sequence[str], base: Path
) -> RankingFigures:
    """Evaluates a run.

    Args:
        data: source of rows; None for the rows that the run held out.
        form: format of the rows.
        at: the checkpoint.
        trusted: keys that may run code and that the user trusts, as ``key=value``.

    Raises:
        UserError: the run or checkpoint does not exist, or the rows cannot be read.
    """
    folder, loaded = open_job(path, trusted, base)
    block = block_of_task(loaded.job, RankingBlock)
    if data is None and block.progressive and read_periods(folder.path):
        return _over_periods(folder, loaded, at, base)
    features = features_of_run(folder)
    rows = rows_of(loaded, features, data, form, base)
    device = device_for(loaded.job)
    with arithmetic_of(device):
        task, step = restored_task(folder, loaded, features, rows, device, at, base)
        _, scored = task.score(rows, SingleProcess(task, device, ()))
        without_row = _shares_without_row(task)
        retrieval = _retrieval(task, loaded, rows, base, later=data is not None)
    found = figures_of(scored, features.outputs, block.at)
    summary = rows.store.summary
    dropped = summary.rows_in - summary.rows if data is not None else 0
    further: dict[str, Any] = {"step": step, "ids_without_row": without_row}
    further |= {"columns_missing": absent} if (absent := rows.absent) else {}
    labels = {}
    if retrieval is not None:
        labels = {features.labels[0]: {**found.labels[features.labels[0]], **retrieval.figures}}
        further |= {"items": retrieval.items, "items_by": retrieval.by}
    return replace(found, labels={**found.labels, **labels}, rows_dropped=dropped, further=further)


def _over_periods(folder: RunFolder, loaded: LoadedJob, at: str, base: Path) -> RankingFigures:
    """Metrics of a progressive run, over the periods that had begun when a checkpoint was made."""
    if at == AVERAGE:
        message = "the periods of a progressive run were evaluated with its weights, not with their averages"
        raise UserError(Problem(message, "name data to evaluate on, or leave --at out"))
    last = None if at == "last" else checkpoint_step(folder, loaded.job, at, base)[1]
    found = over_periods(folder.path, features_of_run(folder), last)
    if found is None:
        raise UserError(Problem(f"no period of the run had begun by step {last}", "name a later one with --at"))
    return found


def _retrieval(task: RankingTask, loaded: LoadedJob, rows: RowSet, base: Path, *, later: bool) -> Retrieval | None:
    """Retrieval metrics of a two-tower model over all items of the run's log; None for other models.

    Args:
        later: whether the rows come after all of the log, and not after its training part.
    """
    if not isinstance(task.model, TwoTower):
        return None
    log = open_log_of(loaded, base, features=task.log.features)
    before = log.training
    if later and log.held_out is not None and len(log.stores) == 1:
        before = replace(before, rows=np.concatenate([before.rows, log.held_out.rows]))
    return retrieval_figures(task, before, rows, task.at)


def _shares_without_row(task: RankingTask) -> dict[str, float]:
    """Returns the share of each feature's ids in the evaluated rows that have no row in their table."""
    absent: Counter[str] = Counter()
    total: Counter[str] = Counter()
    for part in task.evaluation():
        assert isinstance(part.inputs, RankingBatch)
        for name, there in task.tables.found(part.inputs.ids).items():
            absent[name] += int((~there).sum())
            total[name] += len(there)
    return {name: absent[name] / count for name, count in total.items() if count}


def rows_of(loaded: LoadedJob, features: Features, data: str | None, form: str, base: Path) -> RowSet:
    """Opens rows with the run's features: those of ``data``, or those that it held out."""
    job = loaded.job
    ignored = block_of_task(job, RankingBlock).ignore
    if data is not None:
        source = ResolvedSource(path=data, format=form, too_long="cut")  # type: ignore[arg-type]
        return open_rows([source], features, base, ignored)
    held_out = open_log_of(loaded, base, features=features).held_out
    if held_out is None:
        raise UserError("the run held no rows out: name data to evaluate on")
    return held_out


def open_job(path: str, trusted: Sequence[str], base: Path) -> tuple[RunFolder, LoadedJob]:
    """Returns the folder and the job of a run.

    Raises:
        UserError: the run does not exist, or it needs code that the user does not trust.
    """
    folder = find_run(path, base)
    loaded = load_job(folder.job, ["task=ranking"] if TRUSTED in trusted else [])
    if problems := code_problems(loaded):
        raise UserError(*problems)
    return folder, loaded


def restored_model(
    folder: RunFolder, loaded: LoadedJob, features: Features, device: Device, at: str, base: Path
) -> tuple[nn.Module, Embeddings, RankingShape, int]:
    """Returns the tower, the tables, their shape and the step of a checkpoint."""
    checkpoint_step(folder, loaded.job, at, base)  # checks that the checkpoint exists
    tower, tables, shape = build(loaded, features, device)
    rows = ArrivingRows(tables)
    state = state_at(folder, loaded.job, at, base, rows.places)
    restore_weights(tower, state)
    rows.end()
    if isinstance(tower, TwoTower):
        tower.frequencies = None  # only the loss uses them
    return tower.eval(), tables.eval(), shape, state.step


def restored_task(
    folder: RunFolder, loaded: LoadedJob, features: Features, rows: RowSet, device: Device, at: str, base: Path
) -> tuple[RankingTask, int]:
    """Returns the run's task with the weights and rows of a checkpoint, and its step."""
    job, block = loaded.job, block_of_task(loaded.job, RankingBlock)
    tower, tables, shape, step = restored_model(folder, loaded, features, device, at, base)
    task = RankingTask(
        tower,
        tables,
        shape,
        ClickLog(features, rows.part(0, 0), rows, {}),
        seed=job.seed,
        at=block.at,
        in_order=True,
        evaluated=None,
        probabilities=block.gives_probabilities,
        device=device.torch,
        dtype=dtype_of(device),
    )
    return task, step
