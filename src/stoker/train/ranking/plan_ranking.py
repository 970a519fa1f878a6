"""Plan of a job of task ranking on a number of processes: rows, memory, and bytes sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from stoker.data.ranking.ranking_block import IN_BATCH, RankingBlock
from stoker.errors import UserError
from stoker.hardware.machines.cluster import Cluster
from stoker.hardware.process_device import Device
from stoker.job.load_job import LoadedJob
from stoker.job.resolved import ResolvedJob
from stoker.job.task_spec import block_of_task
from stoker.sparse.shard_memory import ShardMemory, predict_memory, row_bytes, state_bytes
from stoker.sparse.table_settings import TableSettings, by_layout
from stoker.sparse.value_format import RowFormat
from stoker.train.optim.optimizer import STATE_TENSORS
from stoker.train.ranking.id_statistics import IdUse, LogReader, within_limits
from stoker.train.ranking.job_log import open_log_of
from stoker.train.ranking.prepare_ranking import build
from stoker.train.ranking.ranking_tables import tables_and_features
from stoker.train.ranking.saved_tables import PART_BYTES
from stoker.train.run_schedule import memory_interval
from stoker.units import GIB

HOTTEST = (0.001, 0.01, 0.1, 0.5)  # shares of a table's rows
OF_HOST = 0.8  # share of a host's memory that rows and tower may take
KEY = 16  # bytes sent per id and its count
COPIES = 2  # in-memory copies of a checkpoint: one is being written or kept while the next one is made
ORDER = 24  # bytes per row of the index sorted by id (row number, table, place) that splitting into parts needs
COUNT = 8  # bytes of a key count, which each process sends to each for each table
ITEM_KEYS = 24  # bytes of an item's id, cell and presence, which each process sends to each


@dataclass(frozen=True)
class TablePlan:
    """Predicted size and use of a table.

    Attributes:
        rows: rows at the end of an epoch, on all processes.
        lookups: mean ids per row of the log.
        row_bytes: bytes of a row's values and optimizer state.
        bytes: bytes of all rows.
        hottest: share of lookups that go to the most frequent rows, by share of the rows.
    """

    name: str
    width: int
    rows: int
    lookups: float
    row_bytes: int
    bytes: int
    hottest: dict[str, float]


@dataclass(frozen=True)
class SentBytes:
    """Mean bytes that a process sends in a step.

    Attributes:
        keys: ids and their counts.
        rows: rows, to the processes that asked for them.
        gradients: gradients of rows, to their owners.
        tower: ring all-reduce of the tower's gradients.
        candidates: keys and vectors of the items for the in-batch softmax, and the vectors' gradients.
    """

    keys: int
    rows: int
    gradients: int
    tower: int = 0
    candidates: int = 0

    @property
    def total(self) -> int:
        return self.keys + self.rows + self.gradients + self.tower + self.candidates


@dataclass(frozen=True)
class RankingPlan:
    """Result of ``stoker plan``.

    Attributes:
        processes: training processes, ``per_host`` of them on a host.
        micro_batch, accumulation: rows of a process' forward pass, and passes of a step.
        lookups, unique: ids of a forward pass, and distinct ones among them.
        holders: processes that hold the rows: the training processes, or servers.
        memory: memory of one holder, for rows.
        checkpoint: additional bytes of a process while it saves; see `saved_by_one`.
        tower: bytes of weights, gradients and optimizer state of a training process.
        softmax: bytes of the in-batch softmax on a training process; see `softmax_bytes`. 0 with another loss.
        sent: bytes sent by a training process.
        host_memory: bytes of a host.
        servers_needed: hosts of that memory needed to hold all rows.
        read: share of the training rows in which ids were counted.
    """

    processes: int
    per_host: int
    micro_batch: int
    accumulation: int
    lookups: int
    unique: int
    tables: tuple[TablePlan, ...]
    holders: int
    served: bool
    memory: ShardMemory
    checkpoint: int
    tower_parameters: int
    tower: int
    softmax: int
    sent: SentBytes
    host_memory: int
    servers_needed: int
    read: float

    @property
    def on_host(self) -> int:
        """Bytes that a host of training processes uses while rows are saved."""
        return self.per_host * (self.tower + self.softmax + self.checkpoint + (0 if self.served else self.memory.total))

    @property
    def fits(self) -> bool:
        """Whether training hosts and servers have enough memory."""
        on_server = self.memory.total if self.served else 0
        return max(self.on_host, on_server) <= OF_HOST * self.host_memory

    def as_json(self) -> dict[str, Any]:
        """Returns the values for ``--json``."""
        values = {"task": "ranking", "fits": self.fits, "on_host": self.on_host, **asdict(self)}
        values["memory"]["total"], values["sent"]["total"] = self.memory.total, self.sent.total
        return values


def plan_ranking(loaded: LoadedJob, base: Path, cluster: Cluster) -> RankingPlan:
    """Counts the ids of a job's log, and predicts training with one process for each device of a cluster.

    Raises:
        UserError: the log cannot be used, or the model does not fit its features.
    """
    job, block = loaded.job, block_of_task(loaded.job, RankingBlock)
    if block.engine != "stoker":
        message = "`stoker plan` counts ids, and the tables of `engine: torchrec` have the rows that `table.rows` says"
        raise UserError(loaded.problem("ranking.engine", message, "write `engine: stoker`"))
    processes, batch = cluster.gpus, job.train.batch
    if batch % processes:
        message = f"{processes} processes cannot share a batch of {batch} rows"
        hint = f"write `batch: {processes * -(-batch // processes)}`"
        raise UserError(loaded.problem("train.batch", message, hint))
    micro = next(m for m in range(min(job.train.micro_batch, batch // processes), 0, -1) if batch // processes % m == 0)
    passes = batch // processes // micro
    wide = job.train.precision == "fp64"
    log = open_log_of(loaded, base)
    tower, _, shape = build(loaded, log.features, Device("cpu", "fp64" if wide else "fp32", ""))
    first_order = bool(getattr(tower, "first_order", False))
    tables, features = tables_and_features(log.features, shape, block, first_order=first_order, wide=wide)
    reader = LogReader(log, shape, by_layout(tables), features, first_order=first_order)
    uses = within_limits(reader.uses(), -(-len(log.training) // batch))
    batches = [*reader.batches(micro, in_order=block.progressive)]
    unique = [float(np.mean([len(keys[n].deduplicated()[2]) for keys in batches])) for n in range(len(uses))]
    served = block.servers is not None
    holders = len(block.servers.addresses) if block.servers else processes
    parameters, item = sum(p.numel() for p in tower.parameters()), 8 if wide else 4
    host_memory = round(cluster.host_memory_gib * GIB)
    everything = sum(predict_memory(use.tables, use.total).total for use in uses)
    sent = [
        sent_bytes(use.tables, n, passes=passes, holders=holders, served=served)
        for use, n in zip(uses, unique, strict=True)
    ]
    ring = round(2 * parameters * item * (processes - 1) / processes)
    buffers = softmax = candidates = 0
    if block.loss == IN_BATCH:
        buffers = sum(b.nbytes for b in tower.buffers())
        softmax = softmax_bytes(micro, batch, item) + 2 * buffers  # and their copy, for a step that is left out
        candidates = (processes - 1) * micro * (ITEM_KEYS + 2 * item * shape.width)
    return RankingPlan(
        processes=processes,
        per_host=cluster.per_node,
        micro_batch=micro,
        accumulation=passes,
        lookups=round(np.mean([sum(map(len, keys)) for keys in batches])),
        unique=round(sum(unique)),
        tables=tuple(_planned(use, number) for use in uses for number in range(len(use.tables))),
        holders=holders,
        served=served,
        memory=_added(
            [held_by_one(use, n * passes * processes, holders=holders) for use, n in zip(uses, unique, strict=True)]
        ),
        checkpoint=saved_by_one(
            job, uses, parameters * item * (1 + STATE_TENSORS[job.train.optimizer]) + buffers, holders, processes
        ),
        tower_parameters=parameters,
        tower=parameters * item * (2 + STATE_TENSORS[job.train.optimizer]),
        softmax=softmax,
        sent=SentBytes(
            sum(s.keys for s in sent),
            sum(s.rows for s in sent),
            sum(s.gradients for s in sent),
            ring,
            candidates,
        ),
        host_memory=host_memory,
        servers_needed=max(1, -(-everything // round(OF_HOST * host_memory))),
        read=min(1.0, max((use.read for use in uses), default=0) / max(1, len(log.training))),
    )


def softmax_bytes(rows: int, candidates: int, item: int) -> int:
    """Peak bytes of the in-batch softmax: three matrices (logits, their logarithmic softmax, a gradient) and a mask.

    Args:
        item: bytes of a number.
    """
    return rows * candidates * (3 * item + 1)


def held_by_one(use: IdUse, first: float, *, holders: int) -> ShardMemory:
    """Returns the memory of one of ``holders``.

    Args:
        first: ids of the first step, on all processes.
    """
    share = -(-use.total // holders)
    return predict_memory(use.tables, share, first=max(1, round(first / holders)), world=holders)


def saved_by_one(job: ResolvedJob, uses: Sequence[IdUse], tower: int, holders: int, processes: int) -> int:
    """Bytes that a process needs beside rows and tower while it saves them: copies, a part of the rows, their index.

    Rows that partly lie in a file are saved part by part, without copies. Servers' rows are in a trainer's memory while
    it saves them.

    Args:
        tower: bytes of its weights and optimizer state.
        holders: processes, or servers, that hold the rows.
    """
    copies = COPIES if job.checkpoint.background or memory_interval(job) != 0 else 0
    if any(table.disk is not None for use in uses for table in use.tables):
        copies = 0
    served = block_of_task(job, RankingBlock).servers is not None
    of_one = -(-holders // processes) if served else 1  # holders whose rows one process saves
    rows = of_one * sum(state_bytes(use.tables, -(-use.total // holders)) for use in uses)
    order = ORDER * of_one * sum(-(-use.total // holders) for use in uses)
    return copies * (tower + rows) + min(rows, PART_BYTES) + (rows if served else order)


def sent_bytes(
    tables: Sequence[TableSettings], unique: float, *, passes: int, holders: int, served: bool = False
) -> SentBytes:
    """Returns the bytes that a process sends in a step for the rows of tables with one layout.

    Args:
        unique: distinct ids of a pass.
        passes: passes of a step.
    """
    values = tables[0].width * RowFormat(tables[0].dtype, tables[0].width).compute.itemsize
    asked = 1 if tables[0].disk is None else 2  # rows in files are also requested a step ahead
    if served:  # servers send the rows
        return SentBytes(round(asked * KEY * unique * passes), 0, round(values * unique * passes))
    away = unique * passes * (holders - 1) / holders
    numbers = COUNT * len(tables) * (holders - 1) * (passes + asked - 1)
    return SentBytes(round(asked * KEY * away) + numbers, round(values * away), round(values * away))


def _planned(use: IdUse, number: int) -> TablePlan:
    table, rows = use.tables[number], use.rows(number)
    hottest = {f"{share:g}": use.covered(number, share) for share in HOTTEST}
    size = row_bytes(table)
    return TablePlan(
        name=table.name,
        width=table.width,
        rows=rows,
        lookups=use.lookups(number),
        row_bytes=size,
        bytes=rows * size,
        hottest=hottest,
    )


def _added(parts: Sequence[ShardMemory]) -> ShardMemory:
    return ShardMemory(*(sum(getattr(part, each.name) for part in parts) for each in fields(ShardMemory)))
