"""The losses of preferences against TRL's formulas, closed forms and finite differences."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from stoker.models.attention.collate import Inputs, pack
from stoker.models.head import Head
from stoker.train.preference import preference_losses as losses
from stoker.train.preference.preference_objective import GOOD, KL, REFERENCE, PreferenceObjective, answer_scores
from stoker.train.tasks.dpo import ResolvedDpoBlock

BETA = 0.3


@pytest.fixture
def ratios() -> tuple[Tensor, Tensor]:
    """Log-ratios of five pairs, some learnt, some not."""
    generator = torch.Generator().manual_seed(0)
    return tuple(3 * torch.randn(5, generator=generator, dtype=torch.float64) for _ in range(2))  # type: ignore[return-value]


def test_sigmoid_is_dpo_and_conservative_dpo(ratios: tuple[Tensor, Tensor]) -> None:
    margin = BETA * (ratios[0] - ratios[1])
    torch.testing.assert_close(losses.sigmoid(margin), torch.log1p(torch.exp(-margin)))
    mixed = 0.9 * losses.sigmoid(margin) + 0.1 * losses.sigmoid(-margin)  # an expectation over wrong labels
    torch.testing.assert_close(losses.sigmoid(margin, 0.1), mixed)


def test_robust_is_unbiased_under_flipped_labels(ratios: tuple[Tensor, Tensor]) -> None:
    margin, flipped = BETA * (ratios[0] - ratios[1]), 0.2
    mean = (1 - flipped) * losses.robust(margin, flipped) + flipped * losses.robust(-margin, flipped)
    torch.testing.assert_close(mean, losses.sigmoid(margin))


def test_ipo_and_hinge_have_their_targets(ratios: tuple[Tensor, Tensor]) -> None:
    difference = torch.tensor([1 / (2 * BETA), 0.0], dtype=torch.float64)
    expected = torch.tensor([0.0, 1 / (2 * BETA) ** 2], dtype=torch.float64)
    torch.testing.assert_close(losses.ipo(BETA * difference, BETA), expected)
    assert losses.hinge(torch.tensor([0.25, 1.0, 2.0])).tolist() == [0.75, 0.0, 0.0]


def test_simpo_and_orpo_are_those_of_trl(ratios: tuple[Tensor, Tensor]) -> None:
    cpo = pytest.importorskip("trl.experimental.cpo").CPOTrainer
    orpo = pytest.importorskip("trl.experimental.orpo").ORPOTrainer
    chosen, rejected = -ratios[0].abs() - 0.01, -ratios[1].abs() - 0.01
    there = SimpleNamespace(device=torch.device("cpu"))
    of = SimpleNamespace(
        beta=2.0, alpha=0.0, loss_type="simpo", simpo_gamma=0.7, label_smoothing=0.1, accelerator=there
    )
    expected, rewards, _ = cpo.cpo_loss(of, chosen, rejected)
    torch.testing.assert_close(losses.simpo(2.0 * (chosen - rejected), 0.7, 0.1), expected)
    torch.testing.assert_close(2.0 * chosen, rewards)
    expected = orpo.odds_ratio_loss(SimpleNamespace(beta=0.1, accelerator=there), chosen, rejected)[0]
    torch.testing.assert_close(0.1 * losses.orpo(chosen, rejected), -expected.double(), rtol=1e-5, atol=1e-6)


def test_orpo_is_exact_near_both_ends() -> None:
    chosen = torch.tensor([-1e-9, -40.0, -0.7, -1e-12], dtype=torch.float64, requires_grad=True)
    rejected = torch.tensor([-1.0, -41.0, -0.69, -1e-12 / 3], dtype=torch.float64)
    found = losses.orpo(chosen, rejected)

    def odds(log_p: float) -> float:
        return log_p - math.log(-math.expm1(log_p))

    expected = [-float(logsigmoid(torch.tensor(odds(c) - odds(r), dtype=torch.float64))) for c, r in zip(
        chosen.tolist(), rejected.tolist(), strict=True)]  # fmt: skip
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))
    found.sum().backward()
    assert chosen.grad is not None and chosen.grad.isfinite().all()


def test_orpo_of_a_certain_answer_is_finite() -> None:
    chosen = torch.zeros(1, requires_grad=True)
    found = losses.orpo(chosen, torch.tensor([-1.0]))
    found.sum().backward()
    assert found.isfinite().all() and chosen.grad is not None and chosen.grad.isfinite().all()


def test_kto_is_its_value_function(ratios: tuple[Tensor, Tensor]) -> None:
    reward, good = BETA * ratios[0], torch.tensor([True, False, True, False, False])
    kl = torch.full_like(reward, 0.4)
    found = losses.kto(reward, good, kl, (1.5, 0.5))
    for r, is_good, loss in zip(reward.tolist(), good.tolist(), found.tolist(), strict=True):
        value = 1 / (1 + math.exp(-(r - 0.4) if is_good else -(0.4 - r)))
        assert loss == pytest.approx((1.5 if is_good else 0.5) * (1 - value))


def pairs() -> tuple[Inputs, Tensor, Head]:
    """Two pairs of answers of one to four tokens, after prompts of two."""
    torch.manual_seed(0)
    rows = [(np.arange(2 + n, dtype=np.uint32), np.arange(2 + n) >= 2) for n in (3, 1, 2, 4)]
    return pack(rows, torch.device("cpu"), share=False), torch.randn(10, 6), Head(torch.nn.Linear(6, 11, bias=False))


def block(**changes: Any) -> ResolvedDpoBlock:
    return ResolvedDpoBlock(**{"beta": BETA, "length_normalise": False, "sft_weight": 0.0, "margin": 0.0, **changes})


def test_sft_weight_is_of_the_mean_cross_entropy_of_the_chosen_answers() -> None:
    inputs, hidden, head = pairs()
    plain, more = (
        PreferenceObjective(block(reference="none", sft_weight=weight))(hidden, inputs, head).total
        for weight in (0.0, 0.5)
    )
    log_p = head.linear(hidden).log_softmax(-1)[range(10), inputs.targets]
    chosen = [log_p[inputs.documents == row].mean() for row in (0, 2)]
    torch.testing.assert_close(more - plain, -0.5 * (chosen[0] + chosen[1]))


REFERENCES = [-5.0, -1.5, -6.0, -8.0]


@pytest.mark.parametrize("by_token", [False, True])
@pytest.mark.parametrize("loss", ["sigmoid", "ipo", "simpo", "orpo", "kto"])
def test_the_loss_of_rows_is_its_formula(loss: str, by_token: bool) -> None:
    """Each factor, mean and margin of a job's block is where the papers have it."""
    inputs, hidden, head = pairs()
    log_p, tokens = (scores.tolist() for scores in answer_scores(hidden, inputs, head))
    with_reference = loss in ("sigmoid", "ipo", "kto")
    ratios = [p - ref * with_reference for p, ref in zip(log_p, REFERENCES, strict=True)]
    means = [ratio / count if by_token else ratio for ratio, count in zip(ratios, tokens, strict=True)]
    good, divergence = [True, True, False, False], 3.0

    def odds(mean: float) -> float:
        return mean - math.log(1 - math.exp(mean))

    def log_sigmoid(x: float) -> float:
        return -math.log(1 + math.exp(-x))

    def of_pair(chosen: float, rejected: float) -> float:
        margin = BETA * (chosen - rejected)
        if loss == "orpo":
            return -BETA * log_sigmoid(odds(chosen) - odds(rejected))
        if loss == "ipo":
            return (chosen - rejected - 1 / (2 * BETA)) ** 2
        if loss == "simpo":
            return -0.9 * log_sigmoid(margin - 0.5) - 0.1 * log_sigmoid(0.5 - margin)
        return -0.9 * log_sigmoid(margin) - 0.1 * log_sigmoid(-margin)

    def of_row(mean: float, is_good: bool) -> float:
        over = BETA * (mean - divergence)
        return (2.0 if is_good else 0.5) * (1 - 1 / (1 + math.exp(-over if is_good else over)))

    expected = sum(map(of_row, means, good)) if loss == "kto" else of_pair(*means[:2]) + of_pair(*means[2:])
    given = {
        REFERENCE: torch.tensor(REFERENCES),
        GOOD: torch.tensor(good),
        KL: torch.full((4,), divergence, dtype=torch.float64),
    }
    settings = block(
        loss=loss, length_normalise=by_token, margin=0.5, label_smoothing=0.1, good_weight=2.0, bad_weight=0.5,
        reference="precomputed" if with_reference else "none",
    )  # fmt: skip
    objective = PreferenceObjective(settings)
    found = objective(hidden, replace(inputs, given=given), head)
    assert found.total.item() == pytest.approx(expected, rel=1e-5)
    if loss == "kto":
        rewards = [BETA * mean for mean in means]
        right = [(reward > BETA * divergence) == is_good for reward, is_good in zip(rewards, good, strict=True)]
        measures = objective.measures.means(objective.measures.take(torch.zeros(1)).tolist(), 4)
        assert found.correct is not None and found.correct.item() == sum(right)
        assert measures == pytest.approx({
            "accuracy": sum(right) / 4,
            "kl": BETA * divergence,
            "chosen_reward": sum(rewards[:2]) / 2,
            "rejected_reward": sum(rewards[2:]) / 2,
            "margin": sum(rewards[:2]) / 2 - sum(rewards[2:]) / 2,
        }, rel=1e-5)  # fmt: skip


def test_means_of_judged_answers_are_of_their_own_number() -> None:
    measures = PreferenceObjective(block(loss="kto", reference="precomputed")).measures
    assert measures.means([6.0, -1.0, 3.0, 2.0, 0.4], 4) == {
        "accuracy": 0.5, "kl": 0.1, "chosen_reward": 2.0, "rejected_reward": -1.0, "margin": 3.0,
    }  # fmt: skip


def test_rewards_that_differ_by_rounding_count_as_equal() -> None:
    """As they do before the first step, where the policy is the reference."""
    inputs, hidden, head = pairs()
    log_p, _ = answer_scores(hidden, inputs, head)
    tokens = torch.tensor([3.0, 1.0, 2.0, 4.0])
    for below, by_token, right in ((2e-6, False, 0), (0.01, False, 2), (1e-6, True, 0), (4e-5, True, 2)):
        apart = below * torch.tensor([1.0, 0.0, 1.0, 0.0]) * (tokens if by_token else 1.0)
        given = replace(inputs, given={REFERENCE: log_p.detach() - apart})
        found = PreferenceObjective(block(reference="adapter-off", length_normalise=by_token))(hidden, given, head)
        assert found.correct == right


@pytest.mark.parametrize(
    "loss",
    [
        lambda c, r: losses.sigmoid(BETA * (c - r), 0.1),
        lambda c, r: losses.robust(BETA * (c - r), 0.1),
        lambda c, r: losses.hinge(BETA * (c - r)),
        lambda c, r: losses.ipo(BETA * (c - r), BETA),
        lambda c, r: losses.simpo(BETA * (c - r), 0.5),
        lambda c, r: losses.orpo(-c.abs() - 0.01, -r.abs() - 0.01),
        lambda c, r: losses.kto(c, r > 0, torch.full_like(c, 0.4)) + 0 * r,
    ],
)
def test_gradients_are_finite_differences(loss: Any, ratios: tuple[Tensor, Tensor]) -> None:
    chosen, rejected = (x.clone().requires_grad_() for x in ratios)
    assert torch.autograd.gradcheck(loss, [chosen, rejected])
