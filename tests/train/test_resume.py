"""A run that was stopped, killed or extended goes on as if nothing had been: equal to the bit."""

from __future__ import annotations

import json
import random
import shutil
import signal
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from running import Crash, Ran, assert_same_state, crash_at, run, stop_at, watching, write_job, write_rows

from stoker.checkpoint.storage import LocalStorage
from stoker.errors import DiskFailed, RunFailed, UserError
from stoker.job.changed_keys import with_effect
from stoker.job.layout import layout_of
from stoker.job.load_job import load_job
from stoker.launch.process_pool import Pool
from stoker.parallel.mesh import Mesh
from stoker.runs.listing import summarise
from stoker.runs.run_folder import RunFolder
from stoker.runs.shared_memory import shared_memory
from stoker.train.engine import Engine
from stoker.train.evaluate import Evaluation
from stoker.train.faults.stop_request import StopRequest
from stoker.train.loop import Loop
from stoker.train.prepare import prepare
from stoker.train.prepared import Prepared
from stoker.train.records.resume_check import check_none_lost
from stoker.train.run import train_run
from stoker.train.run_schedule import Progress

BATCH = 4
MODULE = {
    "task": "module",
    "module": {
        "model": "blobs:network",
        "loss": "blobs:loss",
        "data": "blobs:noisy",
        "evaluate": "blobs:held_out",
        "arguments": {"width": 7},
    },
    "steps": 12,
    "output": "run",
    "train": {"batch": 8, "micro_batch": 4, "lr": 1e-2, "precision": "fp32"},
    "evaluate": {"every": 5},
    "checkpoint": {"every": 4},
}
LORA = {"method": "lora", "rank": 4, "dropout": 0.3}
WHOLE = {"method": "lora", "rank": 4, "loraplus_ratio": 8.0, "modules_to_save": ["lm_head"], "layers": "1"}
# Cadences are not multiples of each other, and of nothing that a run is stopped at.
JOBS: dict[str, dict[str, Any]] = {
    "full": {"checkpoint": {"every": 4}, "evaluate": {"fraction": 0.1, "every": 5}},
    "packed": {"train": {"pack": True, "seq_len": 128}, "checkpoint": {"every": 3}},
    "epochs": {"steps": None, "epochs": 1.2, "checkpoint": {"every": 5}},
    "lora with dropout": {"tune": LORA, "checkpoint": {"every": 3, "keep": 1}},
    "lora+ beside a tied head": {"tune": WHOLE, "checkpoint": {"every": 5}},
    "recomputed": {"tune": LORA, "parallel": {"recompute": "full"}, "checkpoint": {"every": 5}},
    "adafactor": {"train": {"optimizer": "adafactor"}, "checkpoint": {"every": 7}},
    "muon": {"train": {"optimizer": "muon"}, "checkpoint": {"every": 7}},
    "sgd": {"train": {"optimizer": "sgd", "schedule": "wsd"}, "checkpoint": {"every": 7}},
    "bf16": {"train": {"precision": "bf16"}, "checkpoint": {"every": 5}},
    "fp16": {"train": {"precision": "fp16"}, "checkpoint": {"every": 5}},
    "deterministic": {"train": {"deterministic": True, "precision": "bf16"}, "checkpoint": {"every": 5}},
}


def merged(job: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    out = {**job}
    for key, value in changes.items():
        out[key] = {**out[key], **value} if isinstance(value, dict) and key in out else value
    return {key: value for key, value in out.items() if value is not None}


def interrupted(base: Path, job: dict[str, Any], ways: list[Callable[..., Any]], samples: list[int]) -> Ran:
    """Runs a job that ends early, again and again, and then once to the end."""
    for way, sample in zip(ways, samples, strict=True):
        try:
            ended = run(base, job, before=way(sample))
            assert ended.outcome.state == "stopped" and ended.outcome.signal == signal.SIGTERM
        except Crash:
            pass
    return run(base, job)


def assert_as_if_nothing_had_been(ran: Ran, whole: Ran) -> None:
    assert [line["step"] for line in ran.folder.read_metrics()] == list(range(1, whole.outcome.step + 1))
    same = ("loss", "grad_norm", "lr", "tokens", "trained_tokens")
    for line, expected in zip(ran.folder.read_metrics(), whole.folder.read_metrics(), strict=True):
        assert [line[key] for key in same] == [expected[key] for key in same], line["step"]
    assert_same_state(ran.last_state(), whole.last_state())
    assert ran.store.steps()[-1] == whole.store.steps()[-1] == whole.outcome.step
    assert summarise(ran.folder).state == "done"


@pytest.mark.parametrize("name", JOBS)
@pytest.mark.often("full", "packed", "lora with dropout", then="slow")
def test_stopped_and_crashed(name: str, base: Path, sft: dict[str, Any]) -> None:
    job = merged(sft, JOBS[name])
    whole = run(base, job, "output=whole")
    ran = interrupted(base, job, [stop_at, crash_at], [4 * BATCH, 8 * BATCH + 1])
    assert_as_if_nothing_had_been(ran, whole)
    events = [event["event"] for event in ran.folder.read_events()]
    assert events.count("started") == 1 and events.count("resumed") == 2
    assert events.count("stopped") == 1 and events.count("failed") == 1 and events[-1] == "done"


@pytest.mark.parametrize("model", ["network", "half_frozen"])
def test_a_module_with_batch_norm_dropout_and_noise(model: str, base: Path) -> None:
    job = merged(MODULE, {"module": {"model": f"blobs:{model}", "arguments": {}}})
    whole = run(base, job, "output=whole")
    ran = interrupted(base, job, [stop_at, crash_at], [3 * 8, 9 * 8])
    assert any("running_mean" in name for name in whole.last_state().tensors)
    assert_as_if_nothing_had_been(ran, whole)


def test_a_stop_leaves_a_due_evaluation_to_the_next_start(base: Path, sft: dict[str, Any]) -> None:
    job = merged(sft, {"evaluate": {"fraction": 0.1, "every": 4}, "checkpoint": {"every": 12, "best": True}})
    whole = run(base, job, "output=whole")
    stopped = run(base, job, before=stop_at(3 * BATCH))
    assert stopped.outcome.state == "stopped" and stopped.outcome.step == 4
    assert [step for step, _ in evaluations(stopped)] == [0]
    ran = run(base, job)
    assert_as_if_nothing_had_been(ran, whole)
    assert evaluations(ran) == evaluations(whole) and [step for step, _ in evaluations(ran)] == [0, 4, 8, 12]
    assert run(base, job, "output=at the end", before=stop_at(11 * BATCH)).outcome.held_out is not None


def sigterm() -> None:
    signal.raise_signal(signal.SIGTERM)


def stop_in_evaluation(number: int, stop: Callable[[], None] = sigterm) -> Callable[[Prepared], None]:
    """A signal comes in the middle of an evaluation of this start, counted from 1."""

    def before(prepared: Prepared) -> None:
        task, begun = prepared.task, count(1)
        evaluate = task.evaluate

        def stopped(engine: Engine) -> Evaluation | None:
            if next(begun) == number:
                stop()
            return evaluate(engine)

        task.evaluate = stopped  # type: ignore[method-assign]

    return before


def test_a_stop_within_an_evaluation_takes_no_further_step(base: Path, sft: dict[str, Any]) -> None:
    job = merged(sft, {"evaluate": {"fraction": 0.1, "every": 4}, "checkpoint": {"every": 12, "best": True}})
    whole = run(base, job, "output=whole")
    assert run(base, job, before=stop_at(3 * BATCH)).outcome.step == 4  # its evaluation is due
    for number, step in [(1, 4), (2, 8)]:
        stopped = run(base, job, before=stop_in_evaluation(number))
        assert (stopped.outcome.state, stopped.outcome.step) == ("stopped", step)
        assert stopped.store.steps()[-1] == step
    assert_as_if_nothing_had_been(run(base, job), whole)


def test_a_stop_before_the_first_step_takes_none(base: Path, sft: dict[str, Any]) -> None:
    job = merged(sft, {"evaluate": {"fraction": 0.1}})
    stopped = run(base, job, before=stop_in_evaluation(1))
    assert (stopped.outcome.state, stopped.outcome.step, stopped.outcome.exit_code) == ("stopped", 0, 143)
    assert not stopped.store.steps()
    assert_as_if_nothing_had_been(run(base, job), run(base, job, "output=whole"))


def stopped_by_rank_1(path: str) -> tuple[str, int]:
    job = load_job(Path(path) / "job.yaml")
    prepared = prepare(job, Path(path), mesh=Mesh(layout_of(job.job), torch.device("cpu")))
    asked: list[bool] = []
    with pytest.MonkeyPatch.context() as patch:  # no signal: it would go to the pool, in another thread
        patch.setattr(StopRequest, "is_made", lambda _: bool(asked))
        if dist.get_rank() == 1:
            stop_in_evaluation(2, lambda: asked.append(True))(prepared)
        outcome, _ = train_run(prepared, RunFolder(Path(path) / "run"), Path(path), quiet=True)
    return outcome.state, outcome.step


def test_a_stop_of_one_process_within_an_evaluation_stops_all(base: Path, sft: dict[str, Any], pool: Pool) -> None:
    (base / "run").mkdir()
    write_job(base, merged(sft, {"evaluate": {"fraction": 0.1, "every": 4}, "parallel": {"data": 2}}))
    assert pool.run(stopped_by_rank_1, str(base), world=2, timeout=120) == [("paused", 4)] * 2


def evaluations(ran: Ran) -> list[tuple[int, float]]:
    return [(event["step"], event["loss"]) for event in ran.folder.read_events() if event["event"] == "evaluated"]


def test_no_random_state_is_saved_as_none_is_needed(base: Path, sft: dict[str, Any]) -> None:
    """It is a function of the seed, the step and the process: whatever was drawn meanwhile, it is the same again."""

    def draw(_: Any) -> None:
        random.seed(5)
        np.random.seed(6)
        torch.manual_seed(7)

    job = merged(sft, {"tune": LORA, "checkpoint": {"every": 3}})
    whole = run(base, job, "output=whole")
    run(base, job, before=stop_at(4 * BATCH))
    ran = run(base, job, before=draw)
    assert_as_if_nothing_had_been(ran, whole)
    assert set(ran.last_state().numbers) == {"progress", "scaler"}


def test_crashed_before_the_first_checkpoint(base: Path, sft: dict[str, Any]) -> None:
    whole = run(base, sft, "output=whole")
    ran = interrupted(base, {**sft, "checkpoint": {"every": 6}}, [crash_at], [3 * BATCH])
    assert_as_if_nothing_had_been(ran, whole)


def test_stopped_before_the_first_step_is_taken(base: Path, sft: dict[str, Any]) -> None:
    ended = run(base, sft, before=stop_at(0))
    assert ended.outcome.step == 1 and ended.store.steps() == [1]  # the step under way is finished


def test_a_done_run_says_so_and_does_nothing(base: Path, sft: dict[str, Any]) -> None:
    first = run(base, sft)
    before = {p: p.stat().st_mtime_ns for p in first.folder.path.rglob("*") if p.is_file() and p.name != ".lock"}
    again = run(base, sft)
    assert again.outcome.state == "done" and again.outcome.step == 12
    after = {p: p.stat().st_mtime_ns for p in first.folder.path.rglob("*") if p.is_file() and p.name != ".lock"}
    assert after == before


def test_killed_between_its_last_checkpoint_and_its_end(base: Path, sft: dict[str, Any]) -> None:
    first = run(base, sft)
    lines = first.folder.events.read_text().splitlines(keepends=True)
    first.folder.events.write_text("".join(lines[:-1]))
    assert summarise(first.folder).state == "interrupted"
    run(base, sft)
    assert summarise(first.folder).state == "done"


@pytest.mark.slow
def test_raised_steps_go_on(base: Path, sft: dict[str, Any]) -> None:
    constant = merged(sft, {"train": {"schedule": "constant", "warmup": 0}})
    whole = run(base, constant, "output=whole", "steps=12")
    run(base, constant, "steps=5")
    ran = run(base, constant, "steps=12")
    assert_as_if_nothing_had_been(ran, whole)


def test_raised_epochs_skip_no_sample(base: Path, sft: dict[str, Any]) -> None:
    """The last step of an epoch may be small; the next epoch begins right behind it."""
    write_rows(base / "rows.jsonl", 10)
    asked: list[tuple[int, int]] = []

    watch = watching(lambda first, last, _: asked.append((first, last)))

    job = merged(sft, {"steps": None, "epochs": 1})
    assert run(base, job, before=watch).outcome.step == 3
    assert run(base, job, "epochs=2", before=watch).outcome.step == 6
    assert asked == [(0, 4), (4, 8), (8, 10), (10, 14), (14, 18), (18, 20)]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["train.lr=2e-2"], "train.lr was 0.01 and is 0.02"),
        (["seed=1", "train.batch=8"], "seed was 0 and is 1"),
        (["tune=lora"], "tune.method was 'full' and is 'lora'"),
    ],
)
def test_another_job_is_refused(overrides: list[str], words: str, base: Path, sft: dict[str, Any]) -> None:
    run(base, sft, before=stop_at(8))
    with pytest.raises(UserError, match=words) as caught:
        run(base, sft, *overrides)
    assert "--fresh" in str(caught.value)


def test_changed_data_is_refused(base: Path, sft: dict[str, Any]) -> None:
    stopped = run(base, sft, before=stop_at(8))
    before = stopped.folder.metrics.read_text()
    write_rows(base / "rows.jsonl", 40, salt=1)
    with pytest.raises(UserError, match=r"rows\.jsonl has changed"):
        run(base, sft)
    assert stopped.folder.metrics.read_text() == before


def test_a_resumed_job_may_name_a_reward_with_brackets(base: Path) -> None:
    rewards = {"regex:[0-9]+": 1.0}
    job = {"task": "grpo", "model": "tiny", "data": "rows.jsonl", "steps": 2, "grpo": {"rewards": rewards}}
    loaded = load_job(write_job(base, job))
    assert "grpo.rewards.regex:[0-9]+" in with_effect(loaded.job)[0]


def test_a_changed_template_is_refused(base: Path, sft: dict[str, Any]) -> None:
    template = base / "own.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}")
    job = {**sft, "data": {"path": "rows.jsonl", "template": "own.jinja", "train_on": "everything"}}
    run(base, job, before=stop_at(8))
    template.write_text("{% for m in messages %}[{{ m.content }}]<|im_end|>{% endfor %}")
    with pytest.raises(UserError, match=r"the tokenizer or the template of .*rows\.jsonl has changed"):
        run(base, job)


def test_another_tokenizer_is_refused(base: Path, sft: dict[str, Any]) -> None:
    stopped = run(base, sft, before=stop_at(8))
    record = json.loads(stopped.folder.environment.read_text())
    (key,) = (name for name in record["data"] if name.startswith("the tokenizer"))
    record["data"][key] = "0" * len(record["data"][key])
    stopped.folder.environment.write_text(json.dumps(record))
    with pytest.raises(UserError, match=r"the tokenizer or the template of .*rows\.jsonl has changed"):
        run(base, sft)


def test_a_changed_dataset_of_a_module_is_refused(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import blobs

    job = merged(MODULE, {"module": {"data": "blobs:plain"}})
    run(base, job, before=stop_at(16))
    monkeypatch.setattr(blobs, "plain", blobs.held_out)
    with pytest.raises(UserError, match="data has changed"):
        run(base, job)


def test_what_changes_no_step_may_change(base: Path, sft: dict[str, Any]) -> None:
    run(base, sft, before=stop_at(8))
    changes = ["checkpoint.every=2", "evaluate.every=3", "train.micro_batch=2", "parallel.recompute=full"]
    assert run(base, sft, *changes).outcome.state == "done"


def test_the_loss_before_the_first_step_is_known_after_a_restart(base: Path, sft: dict[str, Any]) -> None:
    begun = run(base, sft, "evaluate.fraction=0.2", before=stop_at(2 * BATCH))
    ran = run(base, sft, "evaluate.fraction=0.2")
    assert ran.outcome.held_out_before == begun.outcome.held_out_before == ran.folder.read_events()[1]["loss"]


def test_losses_over_other_rows_are_not_compared(base: Path, sft: dict[str, Any]) -> None:
    more = ["evaluate.fraction=0.2", "evaluate.every=1"]
    run(base, sft, *more, "evaluate.rows=1", before=stop_at(2 * BATCH))
    ran = run(base, sft, *more, "evaluate.rows=all")
    evaluated = [event for event in ran.folder.read_events() if event["event"] == "evaluated"]
    assert evaluated[0]["targets"] != evaluated[-1]["targets"]
    after = {event["step"]: event["loss"] for event in evaluated if event["targets"] == evaluated[-1]["targets"]}
    progress = ran.last_state().numbers["progress"]
    assert (progress["best_loss"], progress["best_targets"]) == (min(after.values()), evaluated[-1]["targets"])
    assert after[progress["best_step"]] == min(after.values())
    assert ran.outcome.held_out_before is None


def test_a_higher_loss_over_other_rows_is_the_best_of_them() -> None:
    progress = Progress(step=4, best_loss=1.0, best_step=3, best_targets=10)
    loop = cast(Loop, SimpleNamespace(progress=progress))
    Loop._remember(loop, Evaluation(2.0, None, 10))
    assert (progress.best_loss, progress.best_step) == (1.0, 3)
    Loop._remember(loop, Evaluation(2.0, None, 20))
    assert (progress.best_loss, progress.best_step, progress.best_targets) == (2.0, 4, 20)


def test_checkpoints_without_their_job_are_refused(base: Path, sft: dict[str, Any]) -> None:
    run(base, sft, "checkpoint.to=shared", before=stop_at(8))
    (base / "shared" / "run.json").unlink()  # whose they are is not known
    with pytest.raises(UserError, match=r"job\.yaml is not"):
        run(base, sft, "checkpoint.to=shared", "output=other")


def test_checkpoints_elsewhere_are_found_again(base: Path, sft: dict[str, Any]) -> None:
    whole = run(base, sft, "output=whole", "checkpoint.to=there")
    ran = interrupted(base, {**sft, "checkpoint": {"to": "elsewhere"}}, [stop_at], [20])
    assert ran.store.folder == base / "elsewhere"
    assert_as_if_nothing_had_been(ran, whole)


@pytest.mark.parametrize("damaged", [1, 2])
def test_damaged_checkpoints_are_passed_over(damaged: int, base: Path, sft: dict[str, Any]) -> None:
    whole = run(base, sft, "output=whole")
    job = merged(sft, {"checkpoint": {"every": 3, "keep": 3}})
    stopped = run(base, job, before=stop_at(9 * BATCH))
    newest = stopped.store.steps()
    assert newest == [6, 9, 10]
    for step in newest[-damaged:]:
        (file,) = stopped.store.storage.path(step).glob("*.distcp")
        file.write_bytes(file.read_bytes()[:-50])

    ran = run(base, job)

    found = [event for event in ran.folder.read_events() if event["event"] == "damaged"]
    assert [event["step"] for event in found] == newest[: -damaged - 1 : -1]
    assert "bytes" in found[0]["error"]
    (resumed,) = [event for event in ran.folder.read_events() if event["event"] == "resumed"]
    assert resumed["step"] == newest[-damaged - 1]
    assert_as_if_nothing_had_been(ran, whole)


def lose_numbers(path: Path) -> None:
    (path / "state.json").unlink()


@pytest.mark.parametrize("damage", [lose_numbers, shutil.rmtree])
def test_without_a_sound_checkpoint_it_is_refused_every_time(
    damage: Callable[[Path], None], base: Path, sft: dict[str, Any]
) -> None:
    """The same command again, as a scheduler gives it, neither starts from the first step nor changes a file."""
    stopped = run(base, sft, before=stop_at(8))
    for step in stopped.store.steps():
        damage(stopped.store.storage.path(step))

    def contents() -> dict[Path, bytes]:
        files = (path for path in stopped.folder.path.rglob("*") if path.is_file())
        return {path: path.read_bytes() for path in files}

    before = contents()
    assert stopped.folder.read_metrics()
    for _ in range(3):
        with pytest.raises(RunFailed, match=r"nothing has been changed.* write --fresh: it renames this run's folder"):
            run(base, sft)
        assert contents() == before


def test_a_last_state_that_cannot_be_written_is_gone_on_from(
    base: Path, sft: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No checkpoint finds room, not even the last; once there is room the same command writes it."""
    whole = run(base, sft, "output=whole")
    (base / "run").mkdir()
    with monkeypatch.context() as full:
        full.setattr(LocalStorage, "room", lambda _: 0)
        with pytest.raises(DiskFailed, match="Step 12 is kept in this machine's memory"), shared_memory(base / "run"):
            run(base, sft, "checkpoint.every=5")
    failed = [event for event in RunFolder(base / "run").read_events() if event["event"] == "save_failed"]
    assert [event["step"] for event in failed] == [5, 10]
    with pytest.raises(UserError, match="another job"), shared_memory(base / "run"):
        run(base, sft, "train.lr=0.5")
    with shared_memory(base / "run"):
        ran = run(base, sft)
    assert_as_if_nothing_had_been(ran, whole)


def test_checkpoints_that_were_taken_back_are_not_missed(tmp_path: Path) -> None:
    """After training has gone back behind the only checkpoint there is none, and none is to be."""
    folder = RunFolder(tmp_path)
    folder.event("started", steps=9)
    folder.event("saved", step=3, where="memory")
    check_none_lost(folder, folder.checkpoints)
    folder.event("saved", step=5, where="disk")
    with pytest.raises(RunFailed, match=r"has saved step 5, and there is no checkpoint in"):
        check_none_lost(folder, folder.checkpoints)
    folder.event("rolled_back", **{"from": 6, "to": 3})
    check_none_lost(folder, folder.checkpoints)
