"""``export.sync``: the store has the run's rows and tower after each update, through faults, evictions and returns."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from click_logs import ranking_job, write_clicks
from redis import ConnectionError as NotReachedError
from running import run, stop_at, write_job

from stoker.errors import RunFailed, UserError
from stoker.job.load_job import load_job
from stoker.launch.process_pool import Pool
from stoker.models.ranking.dcn import DCN
from stoker.models.ranking.model_inputs import RankingShape
from stoker.online_store.row_backends import FORMAT
from stoker.online_store.row_reader import RowReader
from stoker.online_store.store_writers import StoreWriter, roll_back, writer_of
from stoker.runs.step_metrics import StepMetrics
from stoker.sparse import Admission, Eviction, Feature, JaggedIds, SparseEmbeddings, TableSettings
from stoker.train.prepare import prepare
from stoker.train.ranking import export_sync, initial_export, prepare_ranking
from stoker.train.ranking.export_manifest import table_entries
from stoker.train.ranking.export_sync import FILE, ExportSync
from stoker.train.ranking.ranking_scorer import RowScores, StoredScorer
from stoker.train.single_process import SingleProcess

SETTINGS = [
    TableSettings("a", 3, lr=0.1, eviction=Eviction(age=2, every=1, default_row="mean")),
    TableSettings("b", 2, lr=0.1, admission=Admission(count=2), eviction=Eviction(age=3, every=2)),
]


@pytest.fixture(params=["lmdb", "redis"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "lmdb":
        return f"lmdb://{tmp_path / 'store'}"
    return f"{request.getfixturevalue('redis_place')}?prefix={tmp_path.name}"


class Following:
    """What a sync sees of a ranking task."""

    def __init__(self, folder: Path | None, group: Any = None) -> None:
        self.tables = SparseEmbeddings(SETTINGS, {"x": Feature("a"), "y": Feature("b")}, group=group)
        self.model = DCN(RankingShape(("x",), numbers=1, width=3))
        self.folder = folder
        self.before_pause: Callable[[str], None] = lambda kind: None

    def step(self, random: np.random.Generator) -> StepMetrics:
        ids = [JaggedIds.single(torch.from_numpy(random.integers(-20, 20, 6))) for _ in "xy"]
        sum(rows.square().sum() + rows.sum() for rows in self.tables({"x": ids[0], "y": ids[1]}).values()).backward()
        self.tables.apply_gradients()
        with torch.no_grad():
            next(self.model.parameters()).add_(1)
        return metrics_of(self.tables.version)


def metrics_of(step: int) -> StepMetrics:
    return StepMetrics(step, 0.0, 0.0, 0.0, 0, 0, 0.0, 0.0, 0.0)


def described(step: int) -> dict[str, Any]:
    tables = [{"name": t.name, "width": t.width, "dtype": t.dtype} for t in SETTINGS]
    return {"format": FORMAT, "run": "r", "step": step, "made": 0.0, "tables": tables}


def sync_of(task: Any, writer: StoreWriter, **when: Any) -> ExportSync:
    def manifest(step: int) -> dict[str, Any]:
        return {**described(step), "tables": table_entries(task.tables, described(step))}

    return ExportSync(task, writer, manifest=manifest, **{"every_seconds": None, "every_steps": None, **when})


def assert_followed(task: Following, place: str) -> RowReader:
    """The store has exactly the rows of the tables."""
    reader, writer = RowReader(place), writer_of(place)
    for name, table in task.tables.state(is_base=False).tables.items():
        assert writer.rows_of(reader.version, reader.tables[name]) == len(table.ids)
        assert np.array_equal(reader.rows({name: table.ids.numpy()})[name], table.values.numpy())
        default = task.tables.default_rows()[name].astype(np.float32)
        assert np.array_equal(reader.rows({name: np.array([-999])})[name], default[None])
    return reader


def test_hosts_do_not_write_to_one_lmdb(clicks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_job(clicks, ranking_job(export={"sync": {"to": f"lmdb://{clicks}/store"}}))
    monkeypatch.setattr(prepare_ranking, "run_on_all_ranks", lambda work: ["one", "two"])
    with pytest.raises(UserError, match="LMDB is a folder of one host, and the run has processes on 2") as refused:
        prepare(load_job(clicks / "job.yaml", []), clicks)
    assert refused.value.problems[0].line and not (clicks / "store").exists()


def test_after_every_update_the_store_has_the_rows_of_the_run(place: str, tmp_path: Path) -> None:
    task, random = Following(tmp_path), np.random.default_rng(0)
    sync = sync_of(task, writer_of(place), every_steps=3)
    for step in range(1, 25):
        sync.after_step(task.step(random))
        if step == 3:
            sync.finish()
            follower = RowReader(place)  # which no one tells of updates
        if step % 5 == 0:
            task.tables.state(is_base=False)  # a checkpoint
        if step % 3 == 0:
            sync.finish()
            reader = assert_followed(task, place)
            assert reader.manifest["step"] == step and reader.version == 1
            assert (step < 4) or follower.rows({"a": np.array([-999])})["a"].any()
    lines = [json.loads(line) for line in (tmp_path / FILE).read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, *range(3, 25, 3)] and sum(line["removed"] for line in lines) > 5
    assert [line["update"] for line in lines] == list(range(9)) and all(line["stale"] >= 0 for line in lines)
    weights = np.frombuffer(reader.file("tower.safetensors"), np.uint8)
    assert len(weights) > 100 and len(task.tables._fused[0].source.shard.gone._removed) <= 40


def test_a_first_version_is_written_while_steps_go_on(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export_sync, "LOADING", 0.0)
    monkeypatch.setattr(initial_export, "PART_ROWS", 4)  # a part after each step, of rows that come and go meanwhile
    task, random = Following(tmp_path), np.random.default_rng(5)
    for _ in range(6):
        task.step(random)
    sync = sync_of(task, writer_of(place), every_steps=1)
    unseen = 0
    for _ in range(20):
        sync.after_step(task.step(random))
        unseen += writer_of(place).current() == 0
        task.tables.state(is_base=False)
    assert 3 <= unseen < 20
    sync.finish()
    assert assert_followed(task, place).version == 1
    late = sync_of(task, writer_of(place), every_steps=1)  # one whose run ends before it has a version
    late.after_step(task.step(random))
    late.finish()
    assert assert_followed(task, place).version == 2


class Failing:
    """A writer that fails when it is told to."""

    def __init__(self, writer: StoreWriter) -> None:
        self._writer, self.error = writer, None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._writer, name)

    def update(self, *words: Any) -> None:
        if self.error is not None:
            raise self.error
        self._writer.update(*words)


def test_what_a_store_did_not_take_is_sent_again(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(export_sync, "RETRY", 0.0)
    task, random = Following(tmp_path), np.random.default_rng(1)
    writer = Failing(writer_of(place))
    sync = sync_of(task, writer, every_steps=1)
    for step in range(1, 13):
        writer.error = NotReachedError("no way") if 4 <= step < 8 else None
        sync.after_step(task.step(random))
        sync._settle(wait=60.0)
    sync.finish()
    assert_followed(task, place)
    assert capsys.readouterr().err.count("no way") == 1
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [(event["event"], event["step"]) for event in events] == [("export_sync_failed", 4 + n) for n in range(4)]
    assert RowReader(place).version == 1


def test_a_store_that_fails_is_asked_less_and_less_often(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(export_sync.time, "monotonic", lambda: clock[0])
    task, random = Following(tmp_path), np.random.default_rng(1)
    writer = Failing(writer_of(place))
    sync = sync_of(task, writer, every_steps=1)
    sync.after_step(task.step(random))
    writer.error = NotReachedError("no way")
    for second in range(200):
        clock[0] = float(second)
        sync.after_step(metrics_of(second + 1))
        sync._settle(wait=60.0)
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    steps = [event["step"] for event in events]
    assert np.diff(steps).tolist() == [1, 2, 4, 8, 16, 32, 64, 64]
    task.step(random)
    writer.error = None
    sync.finish()  # at the end of the run at once
    assert_followed(task, place)


class Silent:
    """A writer whose calls do not return until they may."""

    def __init__(self, writer: StoreWriter) -> None:
        self._writer, self.may_answer = writer, Event()
        self.may_answer.set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._writer, name)

    def begin(self) -> int:
        self.may_answer.wait()
        return self._writer.begin()

    def update(self, *words: Any) -> None:
        self.may_answer.wait()
        self._writer.update(*words)


def test_a_store_that_never_answers_is_waited_for_with_a_limit(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(export_sync, "PAUSE", 0.1)
    monkeypatch.setattr(export_sync, "PATIENCE", 0.2)
    task, random, writer = Following(tmp_path), np.random.default_rng(4), Silent(writer_of(place))
    sync = sync_of(task, writer, every_seconds=1e-9)
    sync.after_step(task.step(random))
    writer.may_answer.clear()
    for _ in range(3):
        sync.after_step(task.step(random))
        sync.before_pause("evaluation")
    sync.finish()
    assert capsys.readouterr().err.count(f"{place} has not answered for 0.1 s") == 1
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [(event["event"], event["step"]) for event in events] == [
        ("export_sync_failed", 3),
        ("export_sync_failed", 4),
    ]
    writer.may_answer.set()  # what was not waited for arrives, and what has changed since follows
    monkeypatch.setattr(export_sync, "PATIENCE", 60.0)
    sync.after_step(task.step(random))
    sync.finish()
    assert assert_followed(task, place).version == 1


def test_a_store_that_never_answers_ends_a_run_that_has_no_version_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export_sync, "PATIENCE", 0.1)
    task, writer = Following(tmp_path), Silent(writer_of(f"lmdb://{tmp_path}/store"))
    writer.may_answer.clear()
    with pytest.raises(RunFailed, match=r"lmdb://.*/store has not answered for 0.1 s"):
        sync_of(task, writer, every_steps=1).after_step(task.step(np.random.default_rng(6)))
    writer.may_answer.set()


def test_a_version_that_is_dropped_or_a_run_that_goes_back_makes_a_new_one(place: str, tmp_path: Path) -> None:
    task, random = Following(tmp_path), np.random.default_rng(2)
    writer = writer_of(place)
    sync = sync_of(task, writer, every_steps=1)
    for _ in range(3):
        sync.after_step(task.step(random))
    sync.finish()
    writer.drop(1)
    for _ in range(3):
        sync.after_step(task.step(random))
        sync._settle(wait=60.0)
    assert assert_followed(task, place).version == 2
    saved = task.tables.state(is_base=False)
    for _ in range(2):
        sync.after_step(task.step(random))
    task.tables = Following(None).tables
    task.tables.load([saved])
    sync.after_step(task.step(random))
    sync.finish()
    assert assert_followed(task, place).version == 3
    assert roll_back(writer) == (3, 2)
    sync.after_step(task.step(random))
    sync.finish()
    assert RowReader(place).version == 2  # what was rolled back by hand stays so
    assert RowReader(place, version=3).manifest["step"] == task.tables.version


def test_changes_are_sent_by_their_age_and_before_a_pause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = f"lmdb://{tmp_path}/store"
    task, random = Following(tmp_path), np.random.default_rng(3)
    clock = [1000.0]
    monkeypatch.setattr("stoker.train.ranking.export_sync.time.time", lambda: clock[0])
    sync = sync_of(task, writer_of(place), every_seconds=10.0)

    def steps() -> list[int]:
        sync._settle(wait=60.0)
        return [json.loads(line)["step"] for line in (tmp_path / FILE).read_text().splitlines()]

    for _ in range(30):
        sync.after_step(task.step(random))
        sync._settle(wait=60.0)
        clock[0] += 1.0
    assert steps() == [1, 12, 23]  # changes of steps 2 and 13 are 10 s old then
    sync.before_pause("evaluation")  # nobody knows how long it will take
    clock[0] += 60
    sync.after_step(task.step(random))
    assert steps() == [1, 12, 23, 31]
    clock[0] += 1.0
    sync.after_step(task.step(random))
    assert steps() == [1, 12, 23, 31]
    sync.before_pause("checkpoint")  # another kind of pause
    assert steps() == [1, 12, 23, 31]
    sync.before_pause("evaluation")
    assert steps() == [1, 12, 23, 31, 32]
    clock[0] += 1.0
    sync.after_step(task.step(random))
    sync.before_pause("evaluation")  # the last one was short
    assert steps() == [1, 12, 23, 31, 32]
    sync.finish()
    assert steps() == [1, 12, 23, 31, 32, 33]


def of_two(place: str) -> int:
    """Two processes, each with rows of its own."""
    dist_rank = dist.get_rank()
    task, random = Following(None, dist.group.WORLD), np.random.default_rng(dist_rank)
    sync = sync_of(task, writer_of(place), every_seconds=0.001)
    for _ in range(6):
        sync.after_step(task.step(random))
    sync.finish()
    dist.barrier()
    reader = RowReader(place)
    for name, table in task.tables.state(is_base=False).tables.items():
        assert np.array_equal(reader.rows({name: table.ids.numpy()})[name], table.values.numpy())
    return sum(task.tables.rows.values())


def test_processes_send_their_own_rows(pool: Pool, redis_place: str) -> None:
    place = f"{redis_place}?prefix=two"
    counts = pool.run(of_two, place, world=2)
    reader, writer = RowReader(place), writer_of(place)
    assert reader.manifest["step"] == 6 and all(counts)
    assert sum(writer.rows_of(1, table) for table in reader.tables.values()) == sum(counts)


def test_a_run_is_followed_to_its_end_and_after_it_went_on(place: str, tmp_path: Path) -> None:
    write_clicks(tmp_path / "clicks.jsonl")
    job = ranking_job(ranking={"model": "deepfm"}, export={"sync": {"to": place, "every_steps": 2}})
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        done = run(tmp_path, job, before=stop_at(30))
        assert done.outcome.step == 3 and RowReader(place).manifest["step"] == 3
        done = run(tmp_path, job)
    scorer = StoredScorer(RowReader(place))
    assert scorer.step == 6 and RowReader(place).version == 2
    rows = [json.loads(line) for line in (tmp_path / "clicks.jsonl").read_text().splitlines()][180:]
    (found,) = scorer.score([rows])
    task = done.prepared.task
    _, expected = task.score(task.held_out, SingleProcess(task, done.prepared.device, ()))
    assert isinstance(found, RowScores) and np.abs(found.logits - expected.logits).max() < 1e-12
    assert (tmp_path / "run" / FILE).read_text().count("\n") >= 4


@pytest.mark.parametrize(
    ("sync", "changes", "says"),
    [
        ({"to": "folder"}, {}, "export.sync.to|not a store with versions"),
        ({"to": "mysql://h/0"}, {}, "not a store with versions"),
        ({"to": "lmdb://x", "every_steps": 2, "every_seconds": 3}, {}, "both set when"),
        ({"to": "lmdb://x", "every": 2}, {}, "unknown key `export.sync.every`"),
        ({"to": "lmdb://x"}, {"task": "sft", "model": "smollm2-135m"}, "has none"),
        ({"to": "lmdb://x"}, {"ranking": {"servers": {"addresses": ["h:1"], "secret": "s"}}}, "hold the rows"),
        ({"to": "redis://127.0.0.1:1/0"}, {}, "cannot be opened: .*; check the address, and that the store is running"),
        ({"to": "lmdb:///dev/null/x"}, {}, "cannot be used"),
    ],
)
def test_mistakes_are_named_with_their_place(
    sync: dict[str, Any], changes: dict[str, Any], says: str, tmp_path: Path
) -> None:
    write_clicks(tmp_path / "clicks.jsonl")
    job = ranking_job(export={"sync": sync}, **changes)
    if job["task"] == "sft":
        del job["ranking"]
    with pytest.raises(UserError, match=says) as error:
        run(tmp_path, job)
    assert "job.yaml:" in str(error.value) and error.value.exit_code == 2


def test_a_job_says_what_it_does_and_reads_it_back(tmp_path: Path) -> None:
    write_clicks(tmp_path / "clicks.jsonl")
    done = run(tmp_path, ranking_job(steps=1, export={"sync": {"to": f"lmdb://{tmp_path}/s", "every_seconds": 0.5}}))
    again = load_job(done.folder.job)
    assert again.job.export.sync is not None and again.job.export.sync.every_seconds == 0.5
    assert again.job.export.sync.every_steps is None
