"""Answers that are scored by the passes of their only step: the same run as with passes before the step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from running import Ran, run, write_job

from stoker.checkpoint.dcp_store import Store
from stoker.job.layout import layout_of
from stoker.job.load_job import load_job
from stoker.launch.process_pool import Pool
from stoker.parallel.float64_mode import in_float64
from stoker.parallel.mesh import Mesh
from stoker.runs.run_folder import RunFolder
from stoker.train.prepare import prepare
from stoker.train.prepared import Prepared
from stoker.train.rollouts.policy_settings import PolicySettings
from stoker.train.rollouts.rollout_files import ROLLOUTS, RolloutFiles
from stoker.train.run import train_run

STEPS = 3
MEASURED = ("seconds", "time", "tokens_per_s", "memory_gib", "data_seconds", "stall", "effective", "rollout_seconds")
LORA = ("tune.method=lora", "tune.rank=4")
CASES = {
    "grpo": ("grpo.kl=0.0",),
    "with a reference": ("grpo.kl=0.05", *LORA),
    "gspo": ("grpo.loss=gspo", "grpo.kl=0.0", "grpo.entropy=0.01"),
    "prompts drawn again": ("grpo.loss=dapo", "grpo.kl=0.0", "grpo.dynamic=3"),
    "reinforce++": ("grpo.loss=reinforce++", "grpo.kl=0.0"),
}


@pytest.fixture
def one_step(job: dict[str, Any]) -> dict[str, Any]:
    """A job with one step on each iteration, of several micro-batches."""
    train = {**job["train"], "batch": 16, "micro_batch": 4, "precision": "fp64"}
    return {**job, "steps": STEPS, "train": train, "grpo": {**job["grpo"], "epochs": 1}}


def trained(path: str, name: str, overrides: tuple[str, ...], shortcut: bool) -> int:
    """Trains; returns the number of times that answers were scored before a step."""
    base, read = Path(path), 0
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(path)
        if not shortcut:
            patch.setattr(PolicySettings, "scores_in_training", False)
        loaded = load_job(base / "job.yaml", [*overrides, f"output={name}"])
        layout = layout_of(loaded.job)
        mesh = Mesh(layout, torch.device("cpu")) if layout.world > 1 else None
        with in_float64():
            prepared = prepare(loaded, base, mesh=mesh)
            folder = RunFolder(base / name)
            folder.path.mkdir(exist_ok=True)
            before = prepared.engine.read

            def counted(*arguments: Any, **more: Any) -> Any:
                nonlocal read
                read += more.get("tuned", True)
                return before(*arguments, **more)

            patch.setattr(prepared.engine, "read", counted)
            train_run(prepared, folder, base, quiet=True)
    return read


def check_same(base: Path, first: str, second: str) -> None:
    """Checks that two runs have the same weights, metrics and answers with all of their values."""
    one, two = (RunFolder(base / name) for name in (first, second))
    for a, b in zip(one.read_metrics(), two.read_metrics(), strict=True):
        assert a.keys() == b.keys()
        assert {k: v for k, v in a.items() if k not in MEASURED} == pytest.approx(
            {k: v for k, v in b.items() if k not in MEASURED}, rel=1e-12, abs=1e-12, nan_ok=True
        )
    files, others = (RolloutFiles(run.path / ROLLOUTS) for run in (one, two))
    assert files.numbers() == others.numbers() == list(range(STEPS))
    for number in files.numbers():
        a, b = files.read(number), others.read(number)
        assert (a.step, a.next_prompt, a.figures.keys()) == (b.step, b.next_prompt, b.figures.keys())
        for own, other in zip(a.rollouts, b.rollouts, strict=True):
            assert own.answer_ids.tolist() == other.answer_ids.tolist() and own.tokens.keys() == other.tokens.keys()
            for name, values in own.tokens.items():
                assert values.dtype == other.tokens[name].dtype
                np.testing.assert_allclose(values, other.tokens[name], rtol=0, atol=1e-12, err_msg=name)
    states = [Store(run.checkpoints).load(STEPS).tensors for run in (one, two)]
    for name, tensor in states[0].items():
        torch.testing.assert_close(states[1][name], tensor, rtol=0, atol=1e-12, msg=name)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.often("grpo", then="slow")
def test_the_passes_of_the_step_score_as_passes_before_it(case: str, one_step: dict[str, Any], base: Path) -> None:
    write_job(base, one_step)
    assert trained(str(base), "short", CASES[case], True) == 0
    assert trained(str(base), "long", CASES[case], False) == STEPS
    check_same(base, "short", "long")
    assert all(line["ratio"] == 1.0 for line in RunFolder(base / "short").read_metrics())


SPREAD = {
    "DDP": (2, ("parallel.data=2", "grpo.kl=0.0")),
    "zero3 + tensor": (4, ("parallel.data=2", "parallel.shard=zero3", "parallel.tensor=2", "grpo.kl=0.0")),
}


@pytest.mark.parametrize("layout", ["DDP", pytest.param("zero3 + tensor", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_under_a_layout_too(layout: str, one_step: dict[str, Any], base: Path, pool: Pool) -> None:
    world, overrides = SPREAD[layout]
    write_job(base, one_step)
    for name, shortcut in (("short", True), ("long", False)):
        reads = pool.run(trained, str(base), name, overrides, shortcut, world=world, timeout=250)
        assert set(reads) == {0 if shortcut else STEPS}
    check_same(base, "short", "long")


@pytest.mark.parametrize(
    "change",
    [
        {"epochs": 2},
        {"kl_in": "reward"},
        {"batch": 8},
    ],
)
def test_answers_are_scored_before_where_they_must_be(
    change: dict[str, Any], one_step: dict[str, Any], base: Path
) -> None:
    train = {**one_step["train"], "batch": change.pop("batch", 16)}
    write_job(base, {**one_step, "train": train, "steps": 1, "grpo": {**one_step["grpo"], **change}})
    assert trained(str(base), "run", LORA, True) == 1


def test_a_round_of_fewer_prompts_is_scored_before(one_step: dict[str, Any], base: Path) -> None:
    del one_step["steps"]
    write_job(base, {**one_step, "epochs": 1, "grpo": {**one_step["grpo"], "prompts": 5, "answers": 2}})
    assert (
        trained(str(base), "run", ("train.batch=10", "train.micro_batch=5", *LORA), True) == 1
    )  # 24 prompts: the last round has 4
    figures = [line["entropy"] for line in RunFolder(base / "run").read_metrics()]
    assert len(figures) == 5 and all(figures)


@pytest.mark.slow
def test_a_step_that_is_taken_again_scores_again(one_step: dict[str, Any], base: Path) -> None:
    def disturb(prepared: Prepared) -> None:
        train, calls = prepared.engine.train, 0

        def disturbed(*arguments: Any) -> Any:
            nonlocal calls
            calls += 1
            return train(*arguments) * (float("nan") if calls == 2 else 1.0)

        prepared.engine.train = disturbed  # type: ignore[method-assign]

    def alone(name: str, **more: Any) -> Ran:
        return run(base, {**one_step, "output": name, "faults": {"not_finite": "roll-back"}}, **more)

    disturbed, sound = alone("short", before=disturb), alone("long")
    assert [event["step"] for event in disturbed.folder.read_events() if event["event"] == "not_finite"] == [2]
    assert disturbed.losses == sound.losses
    check_same(base, "short", "long")


@pytest.mark.slow
def test_a_run_that_stops_between_iterations_goes_on_to_the_bit(one_step: dict[str, Any], base: Path) -> None:
    whole = run(base, {**one_step, "output": "short"})
    run(base, {**one_step, "output": "long", "steps": STEPS - 1})
    rest = run(base, {**one_step, "output": "long"})
    assert rest.losses == whole.losses
    check_same(base, "short", "long")


def test_an_alarm_about_scores_of_the_step_is_raised_in_it(
    one_step: dict[str, Any], base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stoker.train.rollouts.rollout_figures.APART", -1.0)
    ran = run(base, {**one_step, "steps": 2})
    raised = [e for e in ran.folder.read_events() if e["event"] == "alarm" and "log-probabilities of the" in e["what"]]
    assert [event["step"] for event in raised] == [1]
