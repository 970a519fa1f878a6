"""What follows a step whose numbers went wrong, by policy, against runs that never met one."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from running import Crash, Ran, assert_same_state, at_sample, run, watching
from torch import Tensor

from stoker.checkpoint.dcp_store import Store
from stoker.checkpoint.saver import Saver
from stoker.errors import DiskFailed, RunFailed
from stoker.job.document.job_to_yaml import scalar
from stoker.job.layout import layout_of
from stoker.job.load_job import load_job
from stoker.launch.process_pool import Pool
from stoker.parallel.mesh import Mesh
from stoker.resilience.fault_injection import Fault, write_faults
from stoker.resilience.heartbeat import Heart
from stoker.runs.goodput import goodput
from stoker.runs.json_lines import read_lines
from stoker.runs.run_folder import RunFolder
from stoker.train.prepare import prepare
from stoker.train.prepared import Prepared
from stoker.train.run import train_run

BATCH = 8
MODULE: dict[str, Any] = {
    "task": "module",
    "module": {"model": "blobs:network", "loss": "blobs:loss", "data": "blobs:plain"},
    "steps": 16,
    "output": "run",
    "train": {"batch": BATCH, "precision": "fp32", "lr": 1e-2},
    "checkpoint": {"every": 3, "keep": 9},
}


def with_faults(**faults: Any) -> dict[str, Any]:
    return {**MODULE, "faults": faults}


def bad(spans: Callable[[int], bool], factor: float, *, times: int = 99) -> Callable[[Prepared], None]:
    """The losses of steps with some samples are multiplied, every time or a number of times."""

    def before(prepared: Prepared) -> None:
        task: Any = prepared.task
        loss = task.loss_function
        now, left = [False], [times]

        def notice(first: int, last: int, parts: object) -> None:
            now[0] = spans(first)

        def spoilt(outputs: Tensor, targets: Tensor) -> Tensor:
            value = loss(outputs, targets)
            if not now[0] or not left[0]:
                return value
            left[0] -= 1
            return value * factor

        watching(notice)(prepared)
        task.loss_function = spoilt

    return before


def without(first: int, last: int) -> Callable[[Prepared], None]:
    """The data does not have these samples: what comes behind moves up."""

    def before(prepared: Prepared) -> None:
        task: Any = prepared.task
        parts = task.parts
        task.parts = lambda a, b: parts(a + last - first, b + last - first) if a >= first else parts(a, b)

    return before


def events(ran: Ran, name: str) -> list[dict[str, Any]]:
    return [event for event in ran.folder.read_events() if event["event"] == name]


def assert_trained_alike(ran: Ran, expected: Ran, *, skipped: int) -> None:
    """The same losses at the same steps, the same tensors at the end, all to the bit; samples move on."""
    assert ran.losses == expected.losses
    ours, theirs = ran.last_state(), expected.last_state()
    assert ours.step == theirs.step == 16 and ours.tensors.keys() == theirs.tensors.keys()
    assert all(torch.equal(tensor, theirs.tensors[name]) for name, tensor in ours.tensors.items())  # type: ignore[arg-type]
    assert ours.numbers["progress"]["samples"] == theirs.numbers["progress"]["samples"] + skipped


def test_a_step_is_skipped_and_leaves_no_trace(base: Path) -> None:
    """Batch norm's averages have seen what was not a number, and are put back, too."""
    job = {**with_faults(not_finite="skip"), "checkpoint": {"every": 1, "keep": 99}}

    def spoil_inputs(prepared: Prepared) -> None:
        task: Any = prepared.task
        parts = task.parts

        def spoilt(first: int, last: int) -> Any:
            (part,) = parts(first, last)
            if first == 4 * BATCH:
                part.inputs[0].mul_(math.nan)
            return [part]

        task.parts = spoilt

    ran = run(base, job, before=spoil_inputs)
    assert ran.outcome.state == "done"
    before, after = ran.store.load(4), ran.store.load(5)
    assert any("running_mean" in name for name in before.tensors)
    for name, tensor in before.tensors.items():
        assert torch.equal(tensor, after.tensors[name]), name  # type: ignore[arg-type]
    assert after.numbers["progress"]["samples"] == 5 * BATCH and after.numbers["progress"]["left_out"] == 1
    (event,) = events(ran, "skipped")
    assert event["step"] == 5 and len(event["rows"]) == BATCH and event["loss"] == "nan"
    assert [line["loss"] is None for line in ran.folder.read_metrics()] == [n == 5 for n in range(1, 17)]
    split = goodput(ran.folder)
    assert split is not None and split.parts["left_out"] > 0


def test_too_many_skipped_steps_are_no_fault_of_the_samples(base: Path) -> None:
    with pytest.raises(RunFailed, match=r"step 12: the loss is nan; .* the 8 steps before it were left out"):
        run(base, with_faults(not_finite="skip"), before=bad(lambda first: first >= 3 * BATCH, math.nan))


def test_a_fault_that_passes_changes_nothing(base: Path) -> None:
    job = with_faults(not_finite="roll-back")
    whole = run(base, job, "output=whole")
    ran = run(base, job, before=bad(lambda first: first == 4 * BATCH, math.nan, times=1))
    assert ran.losses == whole.losses
    assert_same_state(ran.last_state(), whole.last_state())
    (event,) = events(ran, "not_finite")
    assert event["step"] == 5 and len(event["rows"]) == BATCH and not events(ran, "rolled_back")


def test_samples_that_are_bad_are_passed_over(base: Path) -> None:
    job = with_faults(not_finite="roll-back")
    expected = run(base, job, "output=expected", before=without(4 * BATCH, 5 * BATCH))
    ran = run(base, job, before=bad(lambda first: first == 4 * BATCH, math.nan))
    assert_trained_alike(ran, expected, skipped=BATCH)
    (event,) = events(ran, "rolled_back")
    assert event["from"] == 5 and event["to"] in (3, 4) and len(event["rows"]) == BATCH  # of the disk, or of memory
    assert event["why"] == "the loss is nan"
    assert ran.last_state().numbers["progress"]["skipped"] == [[4 * BATCH, 5 * BATCH]]
    aside = [line["step"] for line in read_lines(ran.folder.repeated)]
    assert aside == list(range(event["to"] + 1, 5))


def test_going_back_and_giving_up_count_as_a_save(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both wait for a pending checkpoint, and one reads another: a large one takes longer than a step may."""
    phase, waited = [""], []
    beat, wait = Heart.beat, Saver.wait

    def beats(heart: Heart, name: str, step: int = 0) -> None:
        phase[0] = name
        beat(heart, name, step)

    def waits(saver: Saver) -> None:
        waited.append(phase[0])
        wait(saver)

    monkeypatch.setattr(Heart, "beat", beats)
    monkeypatch.setattr(Saver, "wait", waits)
    spoil = bad(lambda first: first == 4 * BATCH, math.nan)
    run(base, with_faults(not_finite="roll-back"), before=spoil)
    run(base, with_faults(spike=6.0, window=8), "output=spike", before=bad(lambda first: first == 10 * BATCH, 50.0))
    with pytest.raises(RunFailed):
        run(base, MODULE, "output=stopped", before=spoil)
    assert set(waited) == {"start", "restore", "save"}


def test_a_held_out_loss_that_is_not_finite_is_not_the_best(base: Path) -> None:
    def spoil(prepared: Prepared) -> None:
        evaluate, losses = prepared.task.evaluate, iter([2.0, math.nan, 3.0, 2.5, 4.0])
        task: Any = prepared.task
        task.evaluate = lambda engine: replace(evaluate(engine), loss=next(losses))

    job = {**MODULE, "module": {**MODULE["module"], "evaluate": "blobs:held_out"}, "evaluate": {"every": 4}}
    ran = run(base, job, before=spoil)
    assert (ran.loop.progress.best_loss, ran.loop.progress.best_step) == (2.5, 12)
    task: Any = ran.loop.task
    task.evaluate = lambda _: replace(ran.loop.evaluation, loss=9.0)  # type: ignore[type-var]
    ran.loop.progress.best_loss = math.nan  # as earlier versions recorded it
    ran.loop._evaluate()
    assert ran.loop.progress.best_loss == 9.0


def test_a_broken_place_does_not_hide_why_the_run_ends(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: Store) -> list[int]:
        raise DiskFailed("not connected")

    def rows(*_: int) -> list[str]:
        monkeypatch.setattr(Store, "steps", broken)
        return ["row 7"]

    def spoil(prepared: Prepared) -> None:
        bad(lambda first: first == 4 * BATCH, math.nan)(prepared)
        task: Any = prepared.task
        task.describe_samples = rows

    with pytest.raises(RunFailed, match=r"the loss is nan.*where the checkpoints are, cannot be used"):
        run(base, MODULE, before=spoil)


def test_bad_samples_at_the_very_start(base: Path) -> None:
    job = with_faults(not_finite="roll-back")
    expected = run(base, job, "output=expected", before=without(0, BATCH))
    ran = run(base, job, before=bad(lambda first: first == 0, math.nan))
    assert_trained_alike(ran, expected, skipped=BATCH)


def test_a_spike_goes_back_and_past_its_samples(base: Path) -> None:
    job = with_faults(spike=6.0, window=8)
    expected = run(base, job, "output=expected", before=without(10 * BATCH, 11 * BATCH))
    ran = run(base, job, before=bad(lambda first: first == 10 * BATCH, 50.0))
    assert_trained_alike(ran, expected, skipped=BATCH)
    (event,) = events(ran, "rolled_back")
    assert event["from"] == 11 and event["to"] in (9, 10) and "deviations above the median" in event["why"]


def test_samples_that_were_skipped_stay_skipped_after_another_rollback(base: Path) -> None:
    job = {**with_faults(not_finite="roll-back"), "checkpoint": {"every": 8, "memory": 0}}
    ran = run(base, job, before=bad(lambda first: first in (9 * BATCH, 12 * BATCH), math.nan))
    assert ran.outcome.state == "done" and [event["to"] for event in events(ran, "rolled_back")] == [8, 8]
    skipped = [[9 * BATCH, 10 * BATCH], [12 * BATCH, 13 * BATCH]]
    assert ran.last_state().numbers["progress"]["skipped"] == skipped
    assert (ran.outcome.first_loss, ran.outcome.last_loss) == (ran.losses[0], ran.losses[-1])


def test_without_a_threshold_spikes_pass(base: Path) -> None:
    ran = run(base, MODULE, before=bad(lambda first: first == 10 * BATCH, 50.0))
    assert ran.outcome.state == "done" and not events(ran, "rolled_back") and max(ran.losses) == ran.losses[10]


def test_where_going_back_does_not_help_the_run_ends(base: Path) -> None:
    job = {**with_faults(spike=6.0, window=8), "checkpoint": {"every": 1, "keep": 9}}
    with pytest.raises(RunFailed, match="gone back 3 times within 8 steps, which did not help"):
        run(base, job, before=bad(lambda first: first >= 10 * BATCH, 50.0))
    found = RunFolder(base / "run").read_events()
    back = [(event["from"], event["to"], len(event["rows"])) for event in found if event["event"] == "rolled_back"]
    assert len(back) == 3
    assert [to for _, to, _ in back] == sorted({to for _, to, _ in back}, reverse=True)  # further each time
    assert back[1][2] > BATCH  # and past all samples since
    assert found[-1]["event"] == "failed" and any(event["event"] == "gave_up" for event in found)


def test_without_an_older_state_the_newest_is_restored_again(base: Path) -> None:
    job = {**with_faults(spike=6.0, window=8), "checkpoint": {"every": 8, "memory": 0}}
    with pytest.raises(RunFailed, match="gone back 3 times"):
        run(base, job, before=bad(lambda first: first >= 10 * BATCH, 50.0))
    found = RunFolder(base / "run").read_events()
    back = [(event["from"], event["to"], len(event["rows"])) for event in found if event["event"] == "rolled_back"]
    assert back == [(11, 8, BATCH)] * 3


def test_killed_after_going_back(base: Path) -> None:
    """Skipped samples are in the next checkpoint; before that the same step leads to the same."""
    job = with_faults(not_finite="roll-back")
    spoil = bad(lambda first: first == 4 * BATCH, math.nan)
    whole = run(base, job, "output=whole", before=spoil)
    for sample in (5 * BATCH, 9 * BATCH):

        def crash() -> None:
            raise Crash

        def both(prepared: Prepared, sample: int = sample) -> None:
            spoil(prepared)
            at_sample(sample, crash)(prepared)

        with pytest.raises(Crash):
            run(base, job, before=both)
    ran = run(base, job, before=spoil)
    assert ran.losses == whole.losses
    assert_same_state(ran.last_state(), whole.last_state())


def test_an_epoch_is_shorter_by_what_is_passed_over(base: Path) -> None:
    job = {key: value for key, value in with_faults(not_finite="roll-back").items() if key != "steps"}
    trained: list[int] = []

    def watch(prepared: Prepared) -> None:
        bad(lambda first: first == 2 * BATCH, math.nan)(prepared)

    ran = run(base, {**job, "epochs": 1}, before=watch)
    lines = ran.folder.read_metrics()
    for before, line in zip([0, *(line["samples"] for line in lines)], lines, strict=False):
        trained += range(before, line["samples"])
    assert ran.outcome.step == 6 and lines[-1]["samples"] == 50
    assert ran.last_state().numbers["progress"]["trained"] == 50 - BATCH


# -- several processes -------------------------------------------------------------------------------------


def run_here(path: str, output: str, overrides: tuple[str, ...]) -> list[str]:
    """One rank of a run; gives the events of its end."""
    base = Path(path)
    loaded = load_job(base / "job.yaml", [f"output={output}", *overrides])
    prepared = prepare(loaded, base, mesh=Mesh(layout_of(loaded.job), CPU))
    folder = RunFolder(base / output)
    folder.path.mkdir(exist_ok=True)
    _, loop = train_run(prepared, folder, base, quiet=True)
    return [event["event"] for event in loop.folder.read_events()]


CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "layout",
    [
        ("parallel.data=2", "parallel.shard=zero3"),
        ("parallel.tensor=2",),
        ("parallel.pipeline=2",),
        ("parallel.data=2",),
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("policy", ["skip", "roll-back"])
@pytest.mark.often(
    "roll-back-parallel.data=2 parallel.shard=zero3", "skip-parallel.tensor=2", "skip-parallel.pipeline=2"
)
def test_what_one_process_finds_all_do(
    layout: tuple[str, ...], policy: str, base: Path, sft: dict[str, Any], pool: Pool
) -> None:
    """Rank 1 alone has bad numbers, once: by one policy the end is as without, by the other all leave one step out."""
    job = {**sft, "steps": 5, "faults": {"not_finite": policy}, "checkpoint": {"every": 1, "keep": 9}}
    (base / "job.yaml").write_text("".join(f"{key}: {scalar(value)}\n" for key, value in job.items()))
    pool.run(run_here, str(base), "calm", layout, world=2)
    write_faults(RunFolder(base / "run"), [Fault("nan", 3, 1)])
    names = pool.run(run_here, str(base), "run", layout, world=2)[0]

    calm, store = Store(base / "calm" / "checkpoints"), Store(base / "run" / "checkpoints")
    if policy == "roll-back":
        assert names.count("not_finite") == 1
        assert_same_state(store.load(5), calm.load(5))
    else:
        assert names.count("skipped") == 1
        before, after = store.load(2), store.load(3)
        assert all(torch.equal(t, after.tensors[name]) for name, t in before.tensors.items())  # type: ignore[arg-type]
        assert store.load(5).numbers["progress"]["left_out"] == 1
