"""Every loss of ``grpo`` and of ``ppo``, from scores to its value, against the formulas of its paper written out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import exp, log
from pathlib import Path
from statistics import mean, stdev
from string import ascii_uppercase, digits
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from answers import LENGTHS, SCORES, answers
from running import run, write_job
from torch import Tensor, nn

from stoker.job.load_job import load_job
from stoker.job.resolved import ResolvedJob
from stoker.job.task_spec import training_of
from stoker.models.attention.collate import Inputs, pack
from stoker.models.head import VALUE_HEAD, Head
from stoker.train.rollouts.actor_critic import ActorCritic
from stoker.train.rollouts.policy_objective import PolicyObjective, kl_estimate
from stoker.train.rollouts.rollout import Rollout
from stoker.train.rollouts.rollout_files import ROLLOUTS, RolloutFiles
from stoker.train.rollouts.shaping import add_advantages, token_weights
from stoker.train.rollouts.token_scores import by_target
from stoker.train.tasks import grpo as grpo_task

CPU = torch.device("cpu")
WIDTH, VOCABULARY, MOST = 6, 11, 9  # MOST: tokens of an answer
GROUPS = (range(3), range(3, 6))
Ratios = list[list[float]]  # of each answer, the log-ratio of each token


@pytest.fixture
def double() -> Any:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def surrogate(log_ratio: float, advantage: float, low: float, high: float) -> float:
    """Schulman et al., 2017, equation 7."""
    ratio = exp(log_ratio)
    return min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)


def in_group(scaled: bool) -> list[float]:
    found = []
    for group in GROUPS:
        scores = [SCORES[i] for i in group]
        found += [(score - mean(scores)) / (stdev(scores) if scaled else 1) for score in scores]
    return found


def grpo(ratios: Ratios, kls: Ratios, _: Ratios) -> float:
    """Shao et al., 2024, equations 3 and 4; an answer's tokens are averaged, then answers."""
    total = 0.0
    for own, references, advantage in zip(ratios, kls, in_group(True), strict=True):
        k3 = [exp(-kl) + kl - 1 for kl in references]
        total += mean(surrogate(x, advantage, 0.2, 0.2) - 0.04 * kl for x, kl in zip(own, k3, strict=True))
    return -total / len(ratios)


def dr_grpo(ratios: Ratios, *_: Ratios) -> float:
    """Liu et al., 2025: no deviation, and a constant instead of an answer's length."""
    advantages = zip(ratios, in_group(False), strict=True)
    return -sum(surrogate(x, a, 0.2, 0.2) / MOST for own, a in advantages for x in own) / len(ratios)


def dapo(ratios: Ratios, *_: Ratios) -> float:
    """Yu et al., 2025, equation 8: a mean over all tokens, clipped higher above."""
    advantages = zip(ratios, in_group(True), strict=True)
    return -sum(surrogate(x, a, 0.2, 0.28) for own, a in advantages for x in own) / sum(LENGTHS)


def gspo(ratios: Ratios, *_: Ratios) -> float:
    """Zheng et al., 2025, equations 5 to 7: the geometric mean of an answer's ratios."""
    advantages = zip(ratios, in_group(True), strict=True)
    return -mean(surrogate(mean(own), advantage, 3e-4, 4e-4) for own, advantage in advantages)


def rloo(ratios: Ratios, _: Ratios, old_kls: Ratios) -> float:
    """Ahmadian et al., 2024, equation 8, with the KL in an answer's reward; PPO's clip for further steps."""
    rewards = [score - 0.05 * sum(kl) for score, kl in zip(SCORES, old_kls, strict=True)]
    total = 0.0
    for group in GROUPS:
        for i in group:
            advantage = rewards[i] - mean(rewards[j] for j in group if j != i)
            total += sum(surrogate(x, advantage, 0.2, 0.2) for x in ratios[i])
    return -total / len(ratios)


def reinforce(ratios: Ratios, _: Ratios, old_kls: Ratios) -> float:
    """Hu, 2025 (REINFORCE++): the score less the KL of this token and those after it, normalised over all tokens."""
    rewarded = zip(SCORES, old_kls, strict=True)
    togo = [[score - 0.01 * sum(kl[t:]) for t in range(len(kl))] for score, kl in rewarded]
    every = [x for own in togo for x in own]
    middle, spread = mean(every), stdev(every)
    pairs = [pair for own, sums in zip(ratios, togo, strict=True) for pair in zip(own, sums, strict=True)]
    return -mean(surrogate(x, (y - middle) / spread, 0.2, 0.2) for x, y in pairs)


PAPERS: dict[str, Callable[[Ratios, Ratios, Ratios], float]] = {
    "grpo": grpo, "dr_grpo": dr_grpo, "dapo": dapo, "gspo": gspo, "rloo": rloo, "reinforce++": reinforce,
}  # fmt: skip


def job_of(base: Path, sft: dict[str, Any], loss: str) -> ResolvedJob:
    job = {key: value for key, value in sft.items() if key not in ("task", "train")}
    block = {"rewards": "exact", "loss": loss, "prompts": 2, "answers": 3, "max_tokens": MOST}
    return load_job(write_job(base, {**job, "task": "grpo", "grpo": block})).job


def rows_of(rollouts: list[Rollout]) -> Inputs:
    """The answers behind prompts of two tokens."""
    random = np.random.default_rng(0)
    drawn = [random.integers(0, VOCABULARY, 2 + r.length).astype(np.uint32) for r in rollouts]
    return pack([(ids, np.arange(len(ids)) >= 2) for ids in drawn], CPU, share=False)


def split(values: Tensor) -> list[list[float]]:
    return [part.tolist() for part in values.split(LENGTHS)]


@pytest.mark.parametrize("loss", PAPERS)
def test_a_loss_is_that_of_its_paper(loss: str, double: None, base: Path, sft: dict[str, Any]) -> None:
    job = job_of(base, sft, loss)
    settings, objective = grpo_task.settings_of(job), training_of(job).objective(job)
    assert isinstance(objective, PolicyObjective)
    torch.manual_seed(2)
    rollouts = answers()
    inputs, head = rows_of(rollouts), Head(nn.Linear(WIDTH, VOCABULARY, bias=False))
    hidden = torch.randn(len(inputs.targets), WIDTH)
    log_p = head.linear(hidden).log_softmax(-1)[range(len(hidden)), inputs.targets]
    near = 0.3 * torch.randn(2, len(hidden))  # ratios within the clips and beyond them
    old, reference = log_p.detach() + near[0] * (0.002 if loss == "gspo" else 1), log_p.detach() + near[1]
    for rollout, own, known in zip(rollouts, split(old), split(reference), strict=True):
        rollout.tokens |= {"old": np.array(own), "reference": np.array(known)}
    add_advantages(rollouts, settings, settings.kl)
    columns = {name: [r.tokens[name] for r in rollouts] for name in ("old", "advantage", "reference")}
    columns["weight"] = token_weights(rollouts, settings)
    total = objective(hidden, replace(inputs, given=by_target(inputs, columns)), head).total
    found = float(total.detach()) / (sum(LENGTHS) if loss in ("dapo", "reinforce++") else len(rollouts))
    ratios, kls, old_kls = split(log_p - old), split(log_p - reference), split(old - reference)
    # grpo adds 1e-4 to the deviation, and whitening 1e-8 to the variance
    assert found == pytest.approx(PAPERS[loss](ratios, kls, old_kls), rel=3e-4, abs=1e-9)


UNEVEN = {"rewards": "length:4", "entropy": 0.5, "max_tokens": 6}


def stopping(model: str) -> dict[str, Any]:
    """A model of which about a tenth of the tokens end an answer, so that lengths differ."""
    return {"name": model, "stop": ["<|im_end|>", *ascii_uppercase, *digits]}


@pytest.mark.parametrize("loss", PAPERS)
def test_a_step_is_normalised_as_its_paper_says(loss: str, job: dict[str, Any], base: Path) -> None:
    """Before the first step every ratio is 1; the entropy bonus is weighed as the rest of the loss is."""
    grpo = {**job["grpo"], **UNEVEN, "loss": loss, "dynamic": 1}
    train = {**job["train"], "batch": 16, "micro_batch": 2}
    ran = run(base, {**job, "model": stopping(job["model"]), "steps": 1, "grpo": grpo, "train": train})
    rollouts = RolloutFiles(ran.folder.path / ROLLOUTS).read(0).rollouts
    gains = [r.tokens["advantage"] + 0.5 * r.tokens["entropy"] for r in rollouts]
    assert len({r.length for r in rollouts}) > 2 and any(r.tokens["advantage"].any() for r in rollouts)
    of_answer = {"grpo": np.mean, "gspo": np.mean, "dr_grpo": lambda gain: sum(gain) / 6, "rloo": sum}
    tokens = np.concatenate(gains)
    expected = mean(map(of_answer[loss], gains)) if loss in of_answer else tokens.mean()  # type: ignore[arg-type]
    assert ran.losses == [pytest.approx(-float(expected), rel=1e-4)]


def test_a_step_of_ppo_is_normalised_by_its_tokens(ppo: dict[str, Any], base: Path) -> None:
    block, train = {**ppo["ppo"], **UNEVEN, "value_weight": 0.3}, {**ppo["train"], "micro_batch": 2}
    ran = run(base, {**ppo, "model": stopping(ppo["model"]), "steps": 1, "ppo": block, "train": train})
    rollouts = RolloutFiles(ran.folder.path / ROLLOUTS).read(0).rollouts
    assert len({r.length for r in rollouts}) > 2
    every = {name: np.concatenate([r.tokens[name] for r in rollouts]) for name in rollouts[0].tokens}
    value_loss = np.mean((every["value"] - every["return"]) ** 2) / 2
    expected = -np.mean(every["advantage"] + 0.5 * every["entropy"]) + 0.3 * value_loss
    assert ran.losses == [pytest.approx(float(expected), rel=1e-4)]
    assert ran.folder.read_metrics()[0]["value_loss"] == pytest.approx(float(value_loss), rel=1e-4)


CLIP = 0.2
VALUES = [  # V, V of the rollout, R, and max((V - R)^2, (clip(V) - R)^2) worked out
    (1.0, 1.1, 3.0, 4.0),  # within the clip
    (2.0, 1.0, 3.0, 1.8**2),  # towards R, and beyond the clip: counts as if it had stopped at 1.2
    (0.0, 1.0, 3.0, 9.0),  # away from R, and beyond the clip: counts as it is
    (3.5, 1.0, 3.0, 1.8**2),
    (-2.0, 1.0, -3.0, 3.8**2),
    (3.0, 3.0, 3.0, 0.0),
]


@pytest.mark.parametrize("clip", [CLIP, None])
def test_the_loss_of_a_critic(clip: float | None, double: None) -> None:
    """Half of the larger squared error, of the value and of the clipped value (Huang et al., 2022, detail 9)."""
    weights = [1.0, 0.5, 2.0, 1.0, 1.0, 3.0]
    model = nn.Module()
    layer = nn.Linear(1, 1)
    layer.weight.data.fill_(2.0)
    layer.bias.data.fill_(-1.0)
    setattr(model, VALUE_HEAD, layer)
    policy = PolicyObjective(clip_low=0.2, clip_high=0.2, critic=True)
    language: Any = SimpleNamespace(model=model, critic=None)
    objective = ActorCritic(policy, value_clip=clip, weight=0.3, language=language)
    value, old, returns, worst = (torch.tensor(column) for column in zip(*VALUES, strict=True))
    hidden = ((value + 1) / 2)[:, None].requires_grad_()
    given = {"value": old, "return": returns, "weight": torch.tensor(weights)}
    inputs = replace(rows_of(answers((1, 1, 1, 1, 1, 1))), given=given)
    loss = objective(hidden, inputs, Head(nn.Linear(1, VOCABULARY)))
    errors = worst if clip is not None else (value - returns) ** 2
    unweighted = sum(w * float(e) for w, e in zip(weights, errors, strict=True)) / 2
    assert float(loss.total.detach()) == pytest.approx(0.3 * unweighted, rel=1e-12)
    measured = dict(zip(objective.measures.names, objective.measures.take(torch.zeros(())).tolist(), strict=True))
    assert measured["value_loss"] == pytest.approx(unweighted, rel=1e-12)
    assert measured["value_clip_fraction"] == (3 if clip is not None else 0)
    (gradient,) = torch.autograd.grad(loss.total, hidden)
    moves = [True, clip is None, True, clip is None, clip is None, False]  # no gradient where the clip binds
    assert (gradient[:, 0] != 0).tolist() == moves


def test_before_a_step_rloo_has_the_gradient_of_reinforce_with_a_baseline(double: None) -> None:
    """The sum over answers of advantage times grad log p(answer) (Ahmadian et al., 2024, equations 7 and 8)."""
    torch.manual_seed(4)
    rollouts = answers()
    inputs, head = rows_of(rollouts), Head(nn.Linear(WIDTH, VOCABULARY, bias=False))
    hidden = torch.randn(len(inputs.targets), WIDTH)
    log_p = head.linear(hidden).log_softmax(-1)[range(len(hidden)), inputs.targets]
    advantages = [SCORES[i] - mean(SCORES[j] for j in group if j != i) for group in GROUPS for i in group]
    (expected,) = torch.autograd.grad(
        -sum(a * own.sum() for a, own in zip(advantages, log_p.split(LENGTHS), strict=True)), head.linear.weight
    )
    by_token = torch.tensor(advantages).repeat_interleave(torch.tensor(LENGTHS))
    given = {"old": log_p.detach(), "advantage": by_token, "weight": torch.ones(len(hidden))}
    loss = PolicyObjective(clip_low=0.2, clip_high=0.2)(hidden, replace(inputs, given=given), head)
    (found,) = torch.autograd.grad(loss.total, head.linear.weight)
    torch.testing.assert_close(found, expected)


def test_one_token_far_from_the_reference_does_not_outweigh_all_others(double: None) -> None:
    """Log-ratios are held within 20, and values of k3 below 10."""
    far, edge = torch.tensor([-30.0, -5.0, 30.0]), log(4.0)
    reference = torch.zeros(3)
    assert kl_estimate(far, reference, "k1").tolist() == [-20.0, -5.0, 20.0]
    assert kl_estimate(far, reference, "k2").tolist() == [200.0, 12.5, 200.0]
    assert kl_estimate(far, reference, "k3").tolist() == pytest.approx([10.0, 10.0, 10.0])
    assert kl_estimate(far, reference, "k3+").tolist() == pytest.approx([10.0, 10.0, 10.0])
    assert float(kl_estimate(torch.tensor(-edge), torch.zeros(()), "k3")) == pytest.approx(4 - 1 - edge)
    log_p = torch.tensor([-5.0], requires_grad=True)
    (gradient,) = torch.autograd.grad(kl_estimate(log_p, torch.zeros(1), "k3+").sum(), log_p)
    assert gradient.tolist() == [-5.0]  # towards the reference, however far
