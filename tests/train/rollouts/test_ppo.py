"""Jobs of ``ppo``: a critic beside the policy, in one process and under layouts."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from running import run, write_job
from test_policy_layouts import check_alike, trained
from transformers import AutoModelForCausalLM

from stoker.checkpoint.load_run import open_run
from stoker.cli.main import main
from stoker.errors import UserError
from stoker.evaluate.measure_run import measure
from stoker.launch.process_pool import Pool
from stoker.train.rollouts.advantages import gae, whitened
from stoker.train.rollouts.policy_task import PolicyTask
from stoker.train.rollouts.rollout_files import ROLLOUTS, RolloutFiles

LORA = {"method": "lora", "rank": 4}


@pytest.fixture
def ppo(job: dict[str, Any]) -> dict[str, Any]:
    """The same prompts and reward for a policy with a critic."""
    ppo = {"rewards": "python:letter:e", "prompts": 8, "max_tokens": 8, "epochs": 2, "kl": 0.05}
    return {**{key: value for key, value in job.items() if key != "grpo"}, "task": "ppo", "ppo": ppo}


@pytest.mark.parametrize("tune", ["full", LORA], ids=["full", "lora"])
def test_values_and_advantages_are_those_of_the_definitions(ppo: dict[str, Any], base: Path, tune: Any) -> None:
    ran = run(base, {**ppo, "tune": tune, "ppo": {**ppo["ppo"], "gamma": 0.9, "lam": 0.8, "kl_in": "reward"}})
    files = RolloutFiles(ran.folder.path / ROLLOUTS)
    assert len(files.numbers()) == 3
    for number in files.numbers():
        rollouts = files.read(number).rollouts
        expected = []
        for r in rollouts:
            rewards = -0.05 * (r.tokens["old"] - r.tokens["reference"])
            rewards[-1] += r.score
            np.testing.assert_allclose(r.tokens["reward"], rewards, atol=1e-6)
            advantages, returns = gae(rewards, r.tokens["value"], gamma=0.9, lam=0.8)
            np.testing.assert_allclose(r.tokens["return"], returns, atol=1e-6)
            expected.append(advantages)
        for r, advantages in zip(rollouts, whitened(expected, shift=True), strict=True):
            np.testing.assert_allclose(r.tokens["advantage"], advantages, atol=1e-5)
    lines = ran.folder.read_metrics()
    assert lines[0]["ratio"] == pytest.approx(1.0, abs=1e-5) and lines[0]["kl"] == pytest.approx(0.0, abs=1e-4)
    assert {"value_loss", "explained_variance"} <= lines[0].keys() and all(line["value_loss"] > 0 for line in lines)
    assert lines[0]["ratio_variance"] < 1e-8 < lines[1]["ratio_variance"]
    for line in lines:
        assert line["kl_reward"] == pytest.approx(-0.05 * line["kl"], rel=1e-5, abs=1e-9)
        assert line["total_reward"] == pytest.approx(line["score"] + line["kl_reward"], rel=1e-9)
    assert lines[0]["value_clip_fraction"] == 0.0
    assert not {"loss_kl", "informative"} & lines[0].keys()  # no KL in the loss, no groups


def test_tokens_are_scored_by_policy_and_reference_at_the_temperature(
    ppo: dict[str, Any], base: Path, tiny_model: Path
) -> None:
    train = {**ppo["train"], "batch": 8, "micro_batch": 2, "lr": 1e-2}
    block = {**ppo["ppo"], "epochs": 1, "temperature": 0.5}
    ran = run(base, {**ppo, "tune": LORA, "train": train, "ppo": block, "steps": 3})
    untuned = AutoModelForCausalLM.from_pretrained(tiny_model)
    for rollout in RolloutFiles(ran.folder.path / ROLLOUTS).read(2).rollouts:
        np.testing.assert_allclose(rollout.tokens["old"], rollout.tokens["sampled"], atol=1e-4)
        ids = torch.from_numpy(np.concatenate([rollout.prompt_ids, rollout.answer_ids]).astype(np.int64))
        with torch.no_grad():
            log_p = (untuned(ids[None]).logits[0, :-1].float() / 0.5).log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        np.testing.assert_allclose(rollout.tokens["reference"], log_p[-rollout.length :], atol=1e-4)
        assert np.abs(rollout.tokens["old"] - rollout.tokens["reference"]).max() > 1e-3  # after two steps


@pytest.mark.slow
@pytest.mark.exhaustive
def test_ppo_learns_to_write_a_letter(ppo: dict[str, Any], base: Path) -> None:
    train = {**ppo["train"], "batch": 64, "lr": 1e-2}
    block = {**ppo["ppo"], "prompts": 64, "epochs": 2, "kl": 0.0}
    job = {**ppo, "steps": 80, "ppo": block, "train": train, "checkpoint": {"every": 80, "memory": 0}}
    lines = run(base, job).folder.read_metrics()
    scores = [line["score"] for line in lines]
    assert np.mean(scores[:3]) < 0.2
    assert np.mean(scores[-5:]) > 0.95
    assert lines[-1]["value_loss"] < lines[1]["value_loss"]


@pytest.mark.slow
def test_a_run_with_a_critic_goes_on_to_the_bit(ppo: dict[str, Any], base: Path) -> None:
    job = {**ppo, "tune": LORA, "train": {**ppo["train"], "batch": 4}}
    whole = run(base, {**job, "output": "whole"})
    run(base, {**job, "output": "parts", "steps": 3})
    rest = run(base, {**job, "output": "parts"})
    assert rest.losses == whole.losses
    expected = whole.last_state().tensors
    assert {name for name in expected if "critic" in name} and {name for name in expected if "value_head" in name}
    for name, tensor in rest.last_state().tensors.items():
        assert (tensor == expected[name]).all(), name


@pytest.mark.slow
def test_the_policy_alone_is_evaluated_and_exported(
    ppo: dict[str, Any],
    base: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    in_process_replay: None,
) -> None:
    run(base, {**ppo, "tune": LORA, "steps": 2})
    monkeypatch.chdir(base)
    assert main(["eval", "run", "rows.jsonl", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["perplexity"] == pytest.approx(math.exp(found["loss"])) and 0 <= found["token_accuracy"] <= 1
    tuned = open_run("run", base)
    loaded = replace(tuned.loaded, job=tuned.job.model_copy(update={"task": "sft", "ppo": None}))
    plain = measure(replace(tuned, loaded=loaded), "rows.jsonl", "auto", base)["tuned"].evaluation
    assert (found["loss"], found["tokens"]) == (pytest.approx(plain.loss), plain.targets)
    assert main(["export", "run", "--format", "merged", "--to", "merged"]) == 0
    assert main(["export", "run", "--format", "adapter", "--to", "adapter"]) == 0
    assert not (base / "adapter" / "critic").exists()
    from safetensors import safe_open

    for path in (base / "merged" / "model.safetensors", base / "adapter" / "adapter_model.safetensors"):
        with safe_open(path, "np") as tensors:
            assert not [name for name in tensors.keys() if "critic" in name or "value_head" in name]  # noqa: SIM118


def test_modules_trained_whole_are_the_policys_alone(ppo: dict[str, Any], base: Path) -> None:
    ran = run(
        base, {**ppo, "tune": {**LORA, "modules_to_save": ["lm_head"]}, "steps": 1, "ppo": {**ppo["ppo"], "kl": 0}}
    )
    saved = [name for name in ran.last_state().tensors if "lora_" not in name]
    assert any("embed_tokens" in name for name in saved)  # the head is tied to it
    assert not [name for name in saved if "original_module" in name or "modules_to_save" in name]


def test_the_factor_of_the_kl_moves_towards_its_target(ppo: dict[str, Any], base: Path) -> None:
    block = {**ppo["ppo"], "kl": 0.1, "kl_target": 100.0, "kl_horizon": 80, "epochs": 1}
    ran = run(base, {**ppo, "steps": 3, "ppo": block})
    factors = [line["kl_factor"] for line in ran.folder.read_metrics()]
    assert factors == pytest.approx([0.1, 0.1 * 0.98, 0.1 * 0.98**2])  # the KL is below: a fifth of 8 / 80 each time


@pytest.mark.parametrize(("kl", "off"), [(1.0, -0.2), (5.4, -0.1), (6.0, 0.0), (6.6, 0.1), (60.0, 0.2)])
def test_the_factor_of_the_kl_follows_the_adaptive_controller(kl: float, off: float) -> None:
    """Ziegler et al. 2019, section 2.2: the relative error, limited to a fifth, times answers / horizon."""
    settings = SimpleNamespace(kl=0.1, kl_target=6.0, kl_horizon=80)
    before = (0, {"kl": kl, "kl_factor": 0.3}, 8)
    task: Any = SimpleNamespace(settings=settings, _before=lambda number: before)
    assert PolicyTask._kl_factor(task, 0) == 0.1
    assert PolicyTask._kl_factor(task, 1) == pytest.approx(0.3 * (1 + off * 8 / 80))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tune": {"method": "prompt", "tokens": 4}}, "no critic can be trained in them"),
        ({"ppo": {"rewards": "exact", "kl_target": 6.0, "kl_in": "loss"}}, "an adaptive KL is one in the reward"),
        ({"ppo": {"rewards": "exact", "prompts": 3}}, "does not divide the 3 answers"),
    ],
)
def test_wrong_jobs_say_what_is_wrong(ppo: dict[str, Any], base: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        run(base, {**ppo, **change})


FULL: tuple[str, ...] = ()
ADAPTERS = ("tune.method=lora", "tune.rank=4")
LAYOUTS = {
    "DDP, LoRA": (2, ("parallel.data=2",), ADAPTERS),
    "zero3 + tensor, LoRA": (4, ("parallel.data=2", "parallel.shard=zero3", "parallel.tensor=2"), ADAPTERS),
    "DDP": (2, ("parallel.data=2",), FULL),
    "zero2": (2, ("parallel.data=2", "parallel.shard=zero2"), FULL),
    "zero3, LoRA": (2, ("parallel.data=2", "parallel.shard=zero3"), ADAPTERS),
    "tensor + sequence": (2, ("parallel.tensor=2", "parallel.sequence=true"), FULL),
    "tensor": (2, ("parallel.tensor=2", "parallel.sequence=false"), FULL),
}
OFTEN = ("zero3 + tensor, LoRA",)


@pytest.mark.parametrize(
    "name", [name if name in OFTEN else pytest.param(name, marks=pytest.mark.exhaustive) for name in LAYOUTS]
)
@pytest.mark.slow
def test_a_policy_and_its_critic_under_a_layout_are_those_of_one_process(
    name: str, ppo: dict[str, Any], base: Path, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, overrides, tune = LAYOUTS[name]
    train = {**ppo["train"], "precision": "fp64", "micro_batch": 2}
    write_job(base, {**ppo, "steps": 3, "train": train, "ppo": {**ppo["ppo"], "epochs": 2}})
    monkeypatch.syspath_prepend(str(base))
    trained(str(base), "alone", tune)
    pool.run(trained, str(base), "spread", (*overrides, *tune), world=world, timeout=250)
    check_alike(
        base, 3, ("loss", "score", "kl", "ratio", "clip_fraction", "value_loss", "explained_variance", "grad_norm")
    )
