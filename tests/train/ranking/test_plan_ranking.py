"""``stoker plan`` of a ranking job: rows, memory and exchange are those of training."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from click_logs import ranking_job
from running import run, write_job
from torch.profiler import ProfilerActivity, profile

from stoker.cli.main import main
from stoker.launch.process_pool import Pool
from stoker.models.ranking.model_inputs import RankingShape
from stoker.models.ranking.two_tower import TwoTower
from stoker.sparse.exchanged_rows import ExchangedRows
from stoker.sparse.hashing import owners_of
from stoker.sparse.jagged_ids import JaggedIds
from stoker.sparse.shard_memory import row_bytes
from stoker.sparse.table_keys import Keys
from stoker.sparse.table_settings import DiskTier, TableSettings
from stoker.sparse.table_shard import TableShard
from stoker.train.ranking import id_statistics
from stoker.train.ranking.id_statistics import IdUse
from stoker.train.ranking.in_batch_softmax import InBatchSoftmax
from stoker.train.ranking.plan_ranking import held_by_one, sent_bytes, softmax_bytes
from stoker.train.ranking.ranking_batch import RankingBatch


def planned(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> dict[str, Any]:
    assert main(["plan", "job.yaml", "--json", *words]) == code
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    "block",
    [{"model": "deepfm"}, {"table": {"admission": {"count": 12}}}, {"features": [{"name": "item_id", "width": 6}]}],
    ids=str,
)
def test_rows_and_tower_are_those_of_training(
    block: dict[str, Any], clicks: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = ranking_job(ranking=block, steps=15)  # an epoch
    trained = run(clicks, job).prepared.task
    plan = planned(capsys)
    assert {table["name"]: table["rows"] for table in plan["tables"]} == trained.tables.rows
    widths = {table.name: table.width for table in trained.tables.tables}
    assert all(table["width"] == widths[table["name"]] for table in plan["tables"])
    assert all(table["row_bytes"] == 8 * table["width"] + 8 for table in plan["tables"])
    assert plan["tower_parameters"] == sum(p.numel() for p in trained.model.parameters())
    assert plan["task"] == "ranking" and plan["fits"] and plan["micro_batch"] * plan["accumulation"] == 12
    for table in plan["tables"]:
        shares = list(table["hottest"].values())
        assert shares == sorted(shares) and 0 < shares[0] <= shares[-1] <= 1
    items = next(table for table in plan["tables"] if table["name"] == "item_id")
    rows = [json.loads(line) for line in (clicks / "clicks.jsonl").read_text().splitlines()][:180]
    assert items["lookups"] == pytest.approx(np.mean([1 + len(row["item_history"]) for row in rows]))


def test_rows_of_a_probable_admission_are_those_expected(clicks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rule = {"count": 2, "probability": 0.25}
    write_job(clicks, ranking_job(ranking={"table": {"admission": rule}}))
    planned_rows = {table["name"]: table["rows"] for table in planned(capsys)["tables"]}
    rows = [json.loads(line) for line in (clicks / "clicks.jsonl").read_text().splitlines()][:180]
    counts = Counter(row["user_id"] for row in rows)
    assert planned_rows["user_id"] == round(sum(1 - 0.75 ** (n - 1) for n in counts.values()))


@pytest.mark.parametrize("also", [{}, {"age": 40}])
def test_a_limit_of_rows_is_planned_unless_it_spares_rows(
    also: dict[str, int], clicks: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def rows(eviction: dict[str, int] | None) -> int:
        write_job(clicks, ranking_job(ranking={"table": {"eviction": eviction}} if eviction else {}, steps=15))
        return sum(table["rows"] for table in planned(capsys)["tables"])

    whole = rows(None)
    limit = {"max_rows": whole // 2, "every": 5, **also}
    found = rows(limit)
    if also:
        assert found == whole
        return
    assert found == pytest.approx(whole // 2 + whole * 5 / 15, abs=3)
    ran = run(clicks, ranking_job(ranking={"table": {"eviction": limit}}, steps=15)).prepared.task
    assert whole // 2 <= sum(ran.tables.rows.values()) <= found


@pytest.mark.parametrize(
    ("changes", "copies"),
    [({}, 2), ({"checkpoint": {"background": False, "memory": 0}}, 0), ({"ranking": {"table": {"memory_rows": 9}}}, 0)],
    ids=["in the background", "while training waits", "partly in a file"],
)
def test_memory_has_what_saving_takes(
    changes: dict[str, Any], copies: int, clicks: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_job(clicks, ranking_job(**changes))
    plan = planned(capsys)
    count = sum(table["rows"] for table in plan["tables"])
    rows = sum(table["rows"] * (16 + table["row_bytes"]) for table in plan["tables"])
    saved = rows + plan["tower_parameters"] * 8 * 3  # AdamW's moments and the weights, in float64
    assert plan["checkpoint"] == copies * saved + rows + 24 * count  # and a part, which here is all of the rows
    assert plan["on_host"] == plan["tower"] + plan["memory"]["total"] + plan["checkpoint"]


def test_the_in_batch_softmax_has_a_row_of_logits_for_each_row(
    clicks: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    block = {"model": "two-tower", "item": ["item_id"]}
    softmax = {**block, "loss": "in-batch-softmax", "logq": {"cells": 99}}
    write_job(clicks, ranking_job(ranking=block))
    other = planned(capsys, "--on", "1x2xh100")
    write_job(clicks, ranking_job(ranking=softmax))
    plan = planned(capsys, "--on", "1x2xh100")
    buffers = 100 * (8 + 8) + 8  # in float64
    logits = 6 * 12 * (3 * 8 + 1)
    assert (other["softmax"], plan["softmax"]) == (0, logits + 2 * buffers)
    assert plan["on_host"] - other["on_host"] == 2 * (plan["softmax"] + 2 * buffers)  # and two copies to save
    assert plan["sent"]["total"] - other["sent"]["total"] == plan["sent"]["candidates"] == 6 * (24 + 2 * 8 * 4)


def test_the_logits_of_the_softmax_take_the_predicted_memory() -> None:
    rows, width = 1500, 4
    tower = TwoTower(RankingShape(("user", "item"), item=("item",), width=width))
    softmax = InBatchSoftmax(tower, "item", batch=rows, group=None)
    nothing = MappingProxyType({"item": JaggedIds.single(torch.arange(rows) % 500)})
    batch = RankingBatch(torch.ones(rows, 1), torch.ones(rows), torch.ones(rows, 0), nothing, torch.arange(rows))
    users, items = (torch.randn(rows, width, requires_grad=True) for _ in range(2))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        softmax(users, items, batch).backward()
    events = profiled.profiler.kineto_results.events()
    peak = max(np.cumsum([event.nbytes() for event in events if event.name() == "[memory]"]))
    assert peak == pytest.approx(softmax_bytes(rows, rows, 4), rel=0.03)


def test_the_report_and_what_cannot_be(clicks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_job(clicks, ranking_job())
    assert main(["plan", "job.yaml", "--on", "2x2xh100"]) == 0
    said = capsys.readouterr().out
    assert "user_id" in said and "4 processes, 3 rows x 1 passes" in said and "exchange" in said and "fits" in said
    assert main(["plan", "job.yaml", "--on", "1x8xh100"]) == 2
    assert "8 processes cannot share a batch of 12 rows; write `batch: 16`" in capsys.readouterr().err
    assert main(["plan", "job.yaml", "--show"]) == 2
    assert "--show is for language models" in capsys.readouterr().err


def test_a_long_log_is_extrapolated(
    clicks: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with (clicks / "clicks.jsonl").open("w") as file:
        for n in range(4000):  # ids that grow as the square root of the rows
            label, user = n % 2, int(np.sqrt(n) * 5)
            file.write(json.dumps({"clicked": label, "user_id": user, "item_id": n % 7, "timestamp": 10**9 + n}) + "\n")
    write_job(clicks, ranking_job(ranking={"ignore": []}))
    whole = {table["name"]: table["rows"] for table in planned(capsys)["tables"]}
    monkeypatch.setattr(id_statistics, "READ", 1000)
    monkeypatch.setattr(id_statistics, "AT_ONCE", 100)
    found = planned(capsys)
    rows = {table["name"]: table["rows"] for table in found["tables"]}
    assert found["read"] == pytest.approx(1000 / 3000) and rows["item_id"] == 7 == whole["item_id"]
    assert rows["user_id"] == pytest.approx(whole["user_id"], rel=0.35)


def exchanged(tables: list[TableSettings], ids: list[int], world: int) -> int:
    """Bytes that a process sends to the others in a step."""
    sent, whole = [], dist.all_to_all_single

    def counted(output: torch.Tensor, given: torch.Tensor, *sizes: Any, group: Any) -> None:
        mine = len(given) // world if not sizes else sizes[1][dist.get_rank()]
        sent.append((len(given) - mine) * given[:1].nbytes)
        whole(output, given, *sizes, group=group)

    dist.all_to_all_single = counted
    try:
        rows = ExchangedRows(tables, seed=0, group=dist.group.WORLD)
        own = np.random.default_rng(dist.get_rank()).choice(10**6, (len(tables), len(ids)), replace=False)
        numbers = np.repeat(np.arange(len(tables)), len(ids))
        keys = Keys.of(own.reshape(-1), numbers, rows.shard.salts)
        if tables[0].disk is not None:
            rows.shard.store._log.waits._waits = 1  # the largest exchange: lookups wait for the disk
            rows.prefetch(keys)
        leaf, inverse = rows.rows(keys, training=True)
        leaf[torch.from_numpy(inverse)].sum().backward()
        rows.apply(scale=1.0, lr_factor=1.0)
    finally:
        dist.all_to_all_single = whole
    return sum(sent)


@pytest.mark.parametrize(("world", "on_disk"), [(2, False), (3, False), (2, True)])
def test_the_exchange_is_as_predicted(world: int, on_disk: bool, pool: Pool, tmp_path: Path) -> None:
    disk = DiskTier(tmp_path, 1000) if on_disk else None
    tables = [TableSettings("a", 16, disk=disk), TableSettings("b", 16, disk=disk)]
    sent = pool.run(exchanged, tables, list(range(4000)), world, world=world)
    wanted = sent_bytes(tables, 8000, passes=1, holders=world)
    assert np.mean(sent) == pytest.approx(wanted.total, rel=0.02)


SCALE = 1024  # a power of two, as the index doubles
PROCESSES = 64
FIRST = 1300  # new ids of a process in the first step, at that scale


def ids_of_one(rows: int, rank: int, salt: np.ndarray) -> np.ndarray:
    """Those of ``rows`` ids that a process owns."""
    ids = np.arange(rows)
    return ids[owners_of(Keys.of(ids, np.zeros(rows, np.int64), salt).hashes, PROCESSES) == rank]


@pytest.mark.parametrize(("optimizer", "rank"), [("rowwise_adagrad", 0), ("adam", 63)])
def test_the_memory_of_a_terabyte_on_64_processes(optimizer: Any, rank: int) -> None:
    """One process' share of a table that is 1,024 times smaller is filled; the plan is of the whole one."""
    table = TableSettings("a", 64, optimizer=optimizer)
    rows = 2**40 // row_bytes(table) // SCALE
    shard = TableShard([table], seed=0, rank=rank, world=PROCESSES)
    own = ids_of_one(rows, rank, shard.salts)
    for begin in range(0, len(own), FIRST):
        some = own[begin : begin + FIRST]
        found = shard.look_up(Keys.of(some, np.zeros(len(some), np.int64), shard.salts))
        shard.update(found.unique, torch.ones(len(found.unique), 64))
        shard.end_step()
    assert len(shard.index) == len(own)
    use = IdUse((table,), (np.ones(rows, np.int64),), (float(SCALE),), rows)
    assert use.total * row_bytes(table) == pytest.approx(2**40, rel=1e-6)
    plan, taken = held_by_one(use, FIRST * SCALE * PROCESSES, holders=PROCESSES), shard.memory
    assert plan.total / SCALE == pytest.approx(taken.total, rel=0.1)
    for part in ("rows", "index", "counters"):
        assert getattr(plan, part) / SCALE == pytest.approx(getattr(taken, part), rel=0.1)


class ThreadsAsProcesses:
    """Collectives between threads, which stand for the processes of a group; bytes to others are counted."""

    def __init__(self, world: int) -> None:
        self.own, self.world = threading.local(), world
        self.barrier = threading.Barrier(world)
        self.given: list[Any] = [None] * world
        self.sent = np.zeros(world, np.int64)

    def get_rank(self, group: Any = None) -> int:
        return int(self.own.rank)

    def get_world_size(self, group: Any = None) -> int:
        return self.world

    def all_to_all_single(
        self, output: torch.Tensor, given: torch.Tensor, received: Any = None, sent: Any = None, *, group: Any
    ) -> None:
        rank, even = self.own.rank, [len(given) // self.world] * self.world
        parts = given.detach().split(sent or even)
        self.given[rank] = parts
        self.sent[rank] += sum(part.nbytes for other, part in enumerate(parts) if other != rank)
        self.barrier.wait()
        output.copy_(torch.cat([others[rank] for others in self.given]))
        self.barrier.wait()

    def run(self, body: Callable[[int], None]) -> None:
        def one(rank: int) -> None:
            self.own.rank = rank
            try:
                body(rank)
            except BaseException:
                self.barrier.abort()
                raise

        with ThreadPoolExecutor(self.world) as threads:
            list(threads.map(one, range(self.world)))


def skewed(batch: int, seed: int, tables: int) -> tuple[np.ndarray, np.ndarray]:
    """Ids of a batch with an id of each table in every sample, and their tables: few ids take most of the lookups."""
    draw = np.random.default_rng(seed)
    return draw.zipf(1.1, batch * tables) % 2**22, np.tile(np.arange(tables), batch)


def test_the_exchange_of_64_processes_with_skewed_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    """The exchange's own code sends the batches of 64 processes; the plan knows eight other batches, as from a log."""
    tables = [TableSettings(name, 16) for name in "abcd"]
    group, batch = ThreadsAsProcesses(PROCESSES), 1024
    for name in ("get_rank", "get_world_size", "all_to_all_single"):
        monkeypatch.setattr(dist, name, getattr(group, name))
    uniques = np.zeros(PROCESSES)

    def step(rank: int) -> None:
        rows = ExchangedRows(tables, seed=0, group=group)  # type: ignore[arg-type]
        keys = Keys.of(*skewed(batch, rank, len(tables)), rows.shard.salts)
        leaf, inverse = rows.rows(keys, training=True)
        uniques[rank] = len(leaf)
        assert len(inverse) == batch * len(tables)
        leaf.grad = torch.ones_like(leaf)
        rows.apply(scale=1.0, lr_factor=1.0)

    group.run(step)
    salts = ExchangedRows(tables, seed=0, group=None).shard.salts
    known = [Keys.of(*skewed(batch, 1000 + n, len(tables)), salts).deduplicated()[2] for n in range(8)]
    wanted = sent_bytes(tables, float(np.mean([*map(len, known)])), passes=1, holders=PROCESSES)
    assert uniques.mean() < 0.8 * batch * len(tables)  # many ids of a batch are the same
    assert group.sent.mean() == pytest.approx(wanted.total, rel=0.02)
    assert group.sent == pytest.approx(wanted.total, rel=0.1)  # of each process, though the hottest ids have one owner
