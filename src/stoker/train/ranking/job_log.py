"""The click log of a job, and its audit; imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from stoker.data.ranking.click_log import ClickLog, open_log, open_sources
from stoker.data.ranking.features import Features
from stoker.data.ranking.log_audit import LogAudit, audit_log
from stoker.data.ranking.log_gate import log_problems
from stoker.data.ranking.log_row_view import rows_of_log
from stoker.data.ranking.log_warnings import log_warnings
from stoker.data.ranking.ranking_block import RankingBlock
from stoker.errors import Problem, UserError
from stoker.job.block import default_of
from stoker.job.load_job import LoadedJob
from stoker.job.task_spec import block_of_task


def open_log_of(loaded: LoadedJob, base: Path, *, training: bool = False, features: Features | None = None) -> ClickLog:
    """Opens the log of a job.

    Args:
        training: whether the job is to train, rather than has trained already.
        features: those that the job has trained with; None to detect them.

    Raises:
        UserError: it cannot be read or must not be trained on; a problem with a key names its place in the job.
    """
    log = _opened(loaded, base, features)
    problems = _problems(loaded, log, training=training)
    if training and not problems:
        problems = _problems_of_training(loaded, log)
    if problems:
        raise UserError(*problems)
    return log


def _problems(loaded: LoadedJob, log: ClickLog, *, training: bool) -> list[Problem]:
    job, block = loaded.job, block_of_task(loaded.job, RankingBlock)
    problems = [loaded.placed(found) for found in log_problems(log, job.data, job.evaluate.data, each_file=training)]
    if log.features.group is None and block.at != default_of(RankingBlock, "at"):
        message = "`ranking.at` has no effect without a group: NDCG and recall are of the rows of one group"
        problems.append(loaded.problem("ranking.at", message, "write `group:` and its column, or remove `at`"))
    return problems


def _problems_of_training(loaded: LoadedJob, log: ClickLog) -> list[Problem]:
    """Returns the problems of a new run alone: runs of before are still evaluated and exported."""
    job, block = loaded.job, block_of_task(loaded.job, RankingBlock)
    problems = []
    wanted, rows = (job.steps or 0) * job.train.batch, len(log.training)
    if block.progressive and wanted > rows:
        message = f"`progressive` trains on each row once, and {job.steps:,} steps take {wanted:,} of {rows:,} rows"
        problems.append(loaded.problem("steps", message, "write `epochs: 1` instead"))
    if block.model == "two-tower" and (found := _cross_of_towers(block, log.features)):
        problems.append(loaded.problem(*found))
    return problems


def _cross_of_towers(block: RankingBlock, features: Features) -> tuple[str, str, str] | None:
    """Returns (key, message, suggestion) of a cross that is not within one tower."""
    for number, cross in enumerate(column for column in features.ids if column.kind == "cross"):
        sides = {name in block.item for name in cross.crossed}
        if len(sides) > 1:
            message = f"{cross.name} combines a feature of the user and one of the item, and each has its own tower"
            return f"ranking.crosses[{number}]", message, "remove it, or write `model: dcn`"
        if sides != {cross.name in block.item}:
            change = f"{'add' if True in sides else 'remove'} {cross.name!r}"
            return "ranking.item", f"{cross.name} is not of the same tower as its features", change
    return None


def _opened(loaded: LoadedJob, base: Path, features: Features | None = None) -> ClickLog:
    job, block = loaded.job, block_of_task(loaded.job, RankingBlock)
    with loaded.errors_at_their_keys():
        return open_log(
            job.data,
            block,
            base,
            held_out=job.evaluate.data,
            fraction=job.evaluate.fraction,
            progressive=block.progressive,
            features=features,
        )


def audit_of(loaded: LoadedJob, base: Path, wanted: Sequence[tuple[str, int]] = ()) -> LogAudit:
    """Audits a job's log.

    Args:
        wanted: rows to show, each as its file and its number there.

    Raises:
        UserError: the log cannot be read, or has no such row.
    """
    log = _opened(loaded, base)
    block = block_of_task(loaded.job, RankingBlock)
    sources = open_sources([*loaded.job.data, *loaded.job.evaluate.data], base) if wanted else []
    rows = rows_of_log(log, sources, wanted, block.ignore)
    found = audit_log(
        log,
        [*_problems(loaded, log, training=True), *_problems_of_training(loaded, log)],
        admission=block.table.admission,
        warnings=log_warnings(log, block.item),
    )
    return replace(found, rows=rows)
