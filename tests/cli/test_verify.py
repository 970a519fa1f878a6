"""``stoker verify`` on tiny jobs: what it prints, what it gives programs, how it ends."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig

from stoker.cli.main import main
from stoker.job.load_job import load_job
from stoker.launch.first_failure import RankFailed
from stoker.verify.difference import Computed, Difference
from stoker.verify.layout_cases import Cell
from stoker.verify.plain_run import run_plain
from stoker.verify.reference_run import widest_gap_midpoint
from stoker.verify.toy_job import Twin, make_twin
from stoker.verify.toy_rows import tokenizer
from stoker.verify.verifier import Verifier
from stoker.verify.verify_run import Trace

DIFFERENCES = {"max_loss_diff", "max_grad_norm_diff", "max_grad_diff", "max_weight_diff", "max_evaluation_diff"}
CHECKS = [
    "plain loop",
    "packing",
    "by steps",
    "replicas",
    "from memory",
    "its checkpoint in one process",
    "one process' checkpoint",
    "not finite",
]


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A job whose model is a configuration beside a file of other weights: verify reads none."""
    monkeypatch.chdir(tmp_path)
    config = LlamaConfig(num_attention_heads=16, num_key_value_heads=4, tie_word_embeddings=True)
    config.save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    save_file({"weights": torch.zeros(1)}, tmp_path / "model" / "model.safetensors")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    path = tmp_path / "job.yaml"
    path.write_text(
        "task: sft\nmodel: model\ndata: rows.jsonl\nsteps: 100\ntune: {method: lora, dropout: 0.1}\n"
        "parallel: {data: 2, shard: zero2}\n"
    )
    return path


@pytest.mark.slow
def test_the_jobs_own_layout_passes(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(job), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["passed"] is True
    (layout,) = found["layouts"]
    assert layout["world"] == 2 and layout["layout"]["shard"] == "zero2" and layout["passed"] is True
    assert all(0 <= layout[key] <= 1e-10 for key in DIFFERENCES)
    checks = layout["checks"]
    assert list(checks) == [*CHECKS, "dropout"] and all(check["passed"] for check in checks.values())
    assert all(0 <= checks["plain loop"][key] <= 1e-10 for key in DIFFERENCES)


POLICY_CHECKS = [
    "scores differ",
    "packing",
    "replicas",
    "from memory",
    "its checkpoint in one process",
    "one process' checkpoint",
]
CRITIC = "task: ppo\nppo: {reward: runs/rm, rewards: 'judge:http://127.0.0.1:1', critic: model, kl: 0.1, epochs: 3}\n"
GROUPS = "task: grpo\ngrpo: {loss: dapo, rewards: {'python:no_such:function': 1}, answers: 8, overlong: 20}\n"


@pytest.mark.slow  # each trains six times
@pytest.mark.parametrize(
    ("task", "layout"),
    [
        (CRITIC, "{data: 4, shard: zero2, shard_size: 2}"),
        (CRITIC, "{data: 2, shard: zero3}"),
        (GROUPS, "{tensor: 2}"),
    ],
)
@pytest.mark.often("task1")
def test_policies_are_verified_with_rewards_of_the_twins_own(
    job: Path, task: str, layout: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the job's rewards name need not be there: the twin's answers are worth something of their own."""
    job.write_text(f"{task}model: model\ndata: rows.jsonl\nsteps: 100\nparallel: {layout}\n")
    assert main(["verify", str(job), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["layouts"]
    assert found["passed"] is True and 0 < found["max_weight_diff"] <= 1e-10
    assert list(found["checks"]) == POLICY_CHECKS and all(check["passed"] for check in found["checks"].values())


def test_a_policy_that_learns_nothing_proves_nothing(job: Path) -> None:
    job.write_text("task: grpo\nmodel: model\ndata: rows.jsonl\ngrpo: {rewards: exact}\nsteps: 9\n")
    (job.parent / "twin").mkdir()
    twin = make_twin(load_job(job), job.parent, job.parent / "twin", steps=1)
    run = computed()
    flat = replace(run, numbers={(1, "loss"): 0.0, (1, "gradient norm"): 1e-9})
    for trace, passed in ((run, True), (flat, False)):
        verdict = Verifier(twin, pool_of(lambda same: same, trace), whole=False).verdict(Cell("", {"data": 2}))
        assert verdict.passed is passed
    assert "all answers have one score, so nothing is learnt" in verdict.reason


@pytest.mark.slow
@pytest.mark.exhaustive
def test_layouts_come_from_a_file(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layouts = job.with_name("layouts.yaml")
    layouts.write_text("- {recompute: full}\n- {tensor: 2, stages: [2]}\n- {data: 4, shard: zero3, shard_size: 3}\n")
    assert main(["verify", str(job), "--layouts", str(layouts), "--steps", "2"]) == 1
    text = capsys.readouterr().out
    assert "twin      llama: width 64, 8 heads (2 of keys and values), vocabulary 131; 2 steps" in text
    assert "1 of 3 layouts compute the same as one process, 2 are invalid" in text
    assert text.count("invalid: ") == 2 and "shard_size" in text and "without `pipeline`" in text
    assert "see also" not in text  # lines of the twin's file


def test_misspelt_keys_of_a_file_of_layouts_are_errors(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layouts = job.with_name("layouts.yaml")
    layouts.write_text("- {data: 2}\n- {data: 2, shrad: zero3}\n- {tensor: 2, sequence: maybe, sync: {evry: 2}}\n")
    assert main(["verify", str(job), "--layouts", str(layouts)]) == 2
    assert capsys.readouterr().err.replace(f"{layouts}", "FILE").splitlines() == [
        "error: FILE:2:13: unknown key `parallel.shrad`; write `shard`",
        "error: FILE:3:25: `parallel.sequence` must be true or false or auto, not 'maybe'; write a value such as auto",
        "error: FILE:3:39: unknown key `parallel.sync.evry`; write `every`",
    ]


def test_a_layout_that_cannot_be_is_no_success(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layouts = job.with_name("layouts.yaml")
    layouts.write_text("- {data: 4, shard: zero3, shard_size: 3}\n")
    assert main(["verify", str(job), "--layouts", str(layouts), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["passed"] is False and found["layouts"][0]["passed"] is None
    assert "shard_size" in found["layouts"][0]["reason"]
    assert all(found["layouts"][0][key] is None for key in DIFFERENCES)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--steps", "0"], "--steps 0: give at least 1"),
        (["--layouts", "nowhere.yaml"], "there is no such file"),
        (["--layouts", "rows.jsonl"], "rows.jsonl: this is a data file, not a job"),
    ],
)
def test_wrong_input_is_one_clear_message(
    arguments: list[str], words: str, job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(job), *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and words in error and error.count("\n") == 1


def pool_of(answer: Callable[[Trace], Trace], computed: Trace) -> Any:
    """Answers as a pool would: what one process computed, and of every other layout what ``answer`` makes of it."""

    class OnePool:
        size, device = 8, "cpu"

        def run(self, function: Any, *_: Any, world: int, **__: Any) -> list[Any]:
            if function is run_plain:
                return [Computed(computed.numbers, computed.gradients, computed.weights)]
            return [computed if world == 1 else answer(computed)]

    return OnePool()


def computed() -> Trace:
    ones = torch.ones(3, dtype=torch.float64)
    numbers = {(1, "loss"): 1.0, (1, "gradient norm"): 1.0}
    gradients = {(1, "a.weight"): ones, (1, "b.weight"): ones}
    return Trace(numbers, gradients, {"a.weight": ones}, replicas=Difference(0.0, "nothing"))


@pytest.fixture
def twin(job: Path) -> Twin:
    folder = job.parent / "twin"
    folder.mkdir()
    return make_twin(load_job(job), job.parent, folder, steps=1)


def test_a_refusal_of_two_keys_is_printed_once(twin: Twin) -> None:
    pool = pool_of(lambda run: run, computed())
    verdict = Verifier(twin, pool, whole=False).verdict(Cell("", {"tensor": 2, "expert": 4}))
    assert verdict.passed is None and verdict.reason.count("must equal `tensor`") == 1


def test_a_wrong_gradient_fails_and_is_named(twin: Twin) -> None:
    def wrong(run: Trace) -> Trace:
        return replace(run, gradients={**run.gradients, (1, "b.weight"): run.gradients[1, "b.weight"] * (1 + 1e-9)})

    pool = pool_of(wrong, computed())
    verdict = Verifier(twin, pool, whole=False).verdict(Cell("", {"data": 2}))
    assert verdict.passed is False and "the gradient of b.weight in step 1 differs by 1.00e-09" in verdict.reason
    assert verdict.as_json()["max_grad_diff"] == pytest.approx(1e-9, rel=1e-6)
    assert Verifier(twin, pool, bound=1e-8, whole=False).verdict(Cell("", {"data": 2})).passed


def test_copies_that_have_come_apart_fail(twin: Twin) -> None:
    apart = Difference(1e-16, "model/a.weight on the processes 0 and 1")
    pool = pool_of(lambda run: replace(run, replicas=apart), computed())
    verdict = Verifier(twin, pool, whole=False).verdict(Cell("", {"data": 2}))
    assert verdict.passed is False and "a.weight on the processes 0 and 1 differs by 1.00e-16" in verdict.reason


def test_what_a_plain_loop_computes_otherwise_fails(twin: Twin) -> None:
    pool = pool_of(lambda run: run, computed())

    def other(function: Any, *rest: Any, run: Any = pool.run, **how: Any) -> Any:
        (found,) = run(function, *rest, **how)
        if function is run_plain:
            found = replace(found, weights={"a.weight": found.weights["a.weight"] * 0.99})
        return [found]

    pool.run = other
    verdict = Verifier(twin, pool).verdict(Cell("", {"data": 2}))
    assert verdict.passed is False and verdict.comparison is not None
    assert verdict.comparison.first_beyond(1e-10) is None
    assert verdict.reason.startswith("plain loop: the weight a.weight after the last step differs by 1.00e-02")
    assert verdict.as_json()["checks"]["plain loop"]["passed"] is False


def failed(twin: Twin, **values: Any) -> dict[str, str]:
    """The reasons of the checks that fail where each run gives other values."""
    run = replace(computed(), **values)
    checks = Verifier(twin, pool_of(lambda _: run, run)).verdict(Cell("", {"data": 2})).checks
    return {check.name: check.reason for check in checks if check.passed is False}


def test_rows_that_are_padded_where_they_could_be_packed_fail(twin: Twin) -> None:
    assert "packing" not in failed(twin, packed=True) | failed(twin, packed=None)
    assert "do not give what the model gives" in failed(twin, packed=False)["packing"]


@pytest.mark.parametrize(
    ("losses", "reason"),
    [
        ((2.0, 2.0, 2.0, 1.9), ""),
        ((2.0, 1.9, 1.9, 1.8), "a step whose gradient is not finite on one process changes the model"),
        ((2.0, 2.0, math.nan, math.nan), "a step whose loss is not finite on one process changes the model"),
        ((2.0, 2.0, 2.0, 2.0), "nothing is trained after a step that is not finite"),
    ],
)
def test_steps_that_are_not_finite_are_left_out(losses: tuple[float, ...], reason: str, twin: Twin) -> None:
    numbers = {(step, "evaluation loss"): loss for step, loss in enumerate(losses)}
    assert failed(twin, numbers=computed().numbers | numbers).get("not finite", "") == reason


def test_a_run_that_starts_over_has_not_resumed(twin: Twin) -> None:
    """Each restart is compared from the step of its state: without one, nothing of it would be."""
    verifier = Verifier(twin, pool_of(lambda run: run, computed()))
    run = replace(computed(), numbers={(3, "loss"): 1.0}, resumed="disk")
    expected = replace(computed(), numbers={(step, "loss"): 1.0 for step in (1, 2, 3)})
    assert verifier._went_on("x", run, expected, 2, "disk").passed
    for other in (
        verifier._went_on("x", run, expected, 2, "memory"),
        verifier._went_on("x", replace(run, resumed=None), expected, 2, "disk"),
        verifier._went_on("x", replace(expected, resumed="disk"), expected, 2, "disk"),
        verifier._went_on("x", replace(run, numbers={}), expected, 2, "disk"),
    ):
        assert other.passed is False and "did not go on from the state of step 2" in other.reason


def test_processes_that_wait_for_each_other_are_named(twin: Twin) -> None:
    def stuck(_: Trace) -> Trace:
        raise RankFailed("rank 1: RuntimeError: Timed out waiting 20000ms for recv operation to complete")

    verdict = Verifier(twin, pool_of(stuck, computed()), whole=False).verdict(Cell("", {"data": 2}))
    assert verdict.passed is False
    assert verdict.reason.startswith("its processes wait for each other: a collective did not end within 20 s (rank 1")


def test_a_layout_that_does_not_end_fails(twin: Twin) -> None:
    def slow(_: Trace) -> Trace:
        raise TimeoutError("ranks [1] of 2 did not end within 300 s")

    verdict = Verifier(twin, pool_of(slow, computed()), whole=False).verdict(Cell("", {"data": 2}))
    assert verdict.passed is False and verdict.reason == "ranks [1] of 2 did not end within 300 s"


def test_a_limit_lies_between_the_norms() -> None:
    assert widest_gap_midpoint((1.0, 1.1, 4.4)) == pytest.approx((1.1 * 4.4) ** 0.5)
    assert widest_gap_midpoint((3.0,)) == 1.5
    assert 0 < widest_gap_midpoint((0.0, 2.0)) < 2.0
