"""The policy's loss against its formula and against finite differences, on a small vocabulary."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from stoker.models.attention.collate import Inputs, empty_row, pack
from stoker.models.head import Head, LogitsHead
from stoker.train.rollouts.policy_objective import LARGEST_K3, PTX, PolicyObjective, kl_estimate
from stoker.train.rollouts.token_scores import TokenScoreReading, by_rollout, by_target

CPU = torch.device("cpu")
WIDTH, VOCABULARY = 6, 11


@pytest.fixture(autouse=True)
def double() -> Any:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def rows_of(lengths: list[int]) -> Inputs:
    """Answers of these lengths to prompts of two tokens."""
    random = np.random.default_rng(0)
    rows = [(random.integers(0, VOCABULARY, 2 + n).astype(np.uint32), np.arange(2 + n) >= 2) for n in lengths]
    return pack(rows, CPU, share=False)


def given(inputs: Inputs, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    n = len(inputs.targets)
    names = {"old": -2.0, "advantage": 0.0, "reference": -2.0}
    return {
        **{name: at + torch.randn(n, generator=generator) for name, at in names.items()},
        "weight": torch.rand(n, generator=generator),
    }


def setup(lengths: list[int]) -> tuple[Tensor, Inputs, Head]:
    torch.manual_seed(1)
    inputs = rows_of(lengths)
    hidden = torch.randn(len(inputs.targets), WIDTH, requires_grad=True)
    return hidden, replace(inputs, given=given(inputs)), Head(nn.Linear(WIDTH, VOCABULARY, bias=False))


def plainly(hidden: Tensor, inputs: Inputs, head: Head, objective: PolicyObjective) -> Tensor:
    """The loss, token by token, from full logits."""
    log_p = (head.linear(hidden) / objective.temperature).log_softmax(-1)
    total = torch.zeros(())
    known = inputs.given
    documents = inputs.documents.tolist()
    ratios = log_p[range(len(documents)), inputs.targets] - known["old"]
    for i, document in enumerate(documents):
        log_ratio = ratios[i]
        if objective.sequence_ratio:
            log_ratio = torch.stack([ratios[j] for j, d in enumerate(documents) if d == document]).mean()
        ratio, advantage = log_ratio.exp(), known["advantage"][i]
        low, high = 1 - objective.clip_low, 1 + objective.clip_high
        gain = torch.min(ratio * advantage, ratio.clamp(low, high) * advantage)
        if objective.dual_clip is not None and advantage < 0:
            gain = torch.max(gain, objective.dual_clip * advantage)
        loss = -gain
        if objective.kl:
            difference = log_p[i, inputs.targets[i]] - known["reference"][i]
            squared, k3 = difference**2 / 2, torch.exp(-difference) - 1 + difference
            estimates = {"k2": squared, "k3": k3, "k3+": k3.detach() + squared - squared.detach()}
            loss = loss + objective.kl * estimates[objective.estimator]
        loss = loss - objective.entropy * -(log_p[i].exp() * log_p[i]).sum()
        total = total + known["weight"][i] * loss
    return total


@pytest.mark.parametrize(
    "settings",
    [
        {"clip_low": 0.2, "clip_high": 0.2},
        {"clip_low": 0.2, "clip_high": 0.28, "kl": 0.1, "estimator": "k3"},
        {"clip_low": 0.2, "clip_high": 0.2, "kl": 0.1, "estimator": "k2"},
        {"clip_low": 0.2, "clip_high": 0.2, "kl": 0.1, "estimator": "k3+"},
        {"clip_low": 0.1, "clip_high": 0.3, "dual_clip": 1.5, "entropy": 0.05, "temperature": 0.7},
        {"clip_low": 0.2, "clip_high": 0.4, "sequence_ratio": True, "entropy": 0.1},
    ],
)
def test_loss_and_gradients_are_those_of_the_formula(settings: dict[str, Any]) -> None:
    hidden, inputs, head = setup([3, 5, 1])
    objective = PolicyObjective(**settings)
    loss = objective(hidden, inputs, head).total
    expected = plainly(hidden, inputs, head, objective)
    torch.testing.assert_close(loss, expected)
    wanted = torch.autograd.grad(expected, (hidden, head.linear.weight))
    for found, right in zip(torch.autograd.grad(loss, (hidden, head.linear.weight)), wanted, strict=True):
        torch.testing.assert_close(found, right)


def test_a_model_with_logits_of_its_own_has_the_same_loss() -> None:
    hidden, inputs, head = setup([3, 5])
    objective = PolicyObjective(clip_low=0.2, clip_high=0.2, temperature=0.6, entropy=0.1)
    ours = objective(hidden, inputs, head).total
    torch.testing.assert_close(objective(head.linear(hidden), inputs, LogitsHead()).total, ours)


def test_before_the_first_step_the_ratio_is_one() -> None:
    hidden, inputs, head = setup([4, 2])
    scores = TokenScoreReading(0.8)(hidden.detach(), inputs, head)
    even = torch.full_like(scores[0], 1.0 / len(scores[0]))
    inputs = replace(inputs, given={**inputs.given, "old": scores[0], "weight": even})
    objective = PolicyObjective(clip_low=0.2, clip_high=0.2, temperature=0.8)
    objective(hidden, inputs, head)
    means = objective.measures.take(torch.zeros(())) / len(inputs.targets)
    measured = dict(zip(objective.measures.names, means.tolist(), strict=True))
    assert measured.pop("ratio_variance") == pytest.approx(0.0, abs=1e-12)
    assert measured == pytest.approx({"ratio": 1.0, "approx_kl": 0.0, "clip_fraction": 0.0}, abs=1e-12)
    assert "loss_kl" in PolicyObjective(clip_low=0.2, clip_high=0.2, kl=0.1).measures.names


def test_approx_kl_is_the_divergence_from_the_policy_that_sampled() -> None:
    hidden, inputs, head = setup([4, 2])
    log_ratio = TokenScoreReading(1.0)(hidden.detach(), inputs, head)[0] - inputs.given["old"]
    objective = PolicyObjective(clip_low=0.2, clip_high=0.2)
    objective(hidden, inputs, head)
    sums = dict(zip(objective.measures.names, objective.measures.take(torch.zeros(())).tolist(), strict=True))
    assert sums["approx_kl"] == pytest.approx(float((log_ratio.exp() - 1 - log_ratio).detach().sum()))


def test_a_token_that_has_become_unlikely_keeps_the_loss_finite() -> None:
    hidden, inputs, head = setup([3])
    far = replace(inputs, given={**inputs.given, "old": torch.full((3,), -800.0), "advantage": -torch.ones(3)})
    loss = PolicyObjective(clip_low=0.2, clip_high=0.2)(hidden, far, head).total
    assert loss.item() == pytest.approx(float(np.exp(20.0) * far.given["weight"].sum()))


def test_answers_that_the_step_itself_scores_have_the_gradient_of_those_scored_before() -> None:
    hidden, inputs, head = setup([4, 2])
    objective = PolicyObjective(clip_low=0.2, clip_high=0.2, temperature=0.8)
    scored = {**inputs.given, "old": TokenScoreReading(0.8)(hidden.detach(), inputs, head)[0].detach()}
    unscored = {name: values for name, values in inputs.given.items() if name != "old"}
    grads = [
        torch.autograd.grad(objective(hidden, replace(inputs, given=known), head).total, hidden)[0]
        for known in (scored, unscored)
    ]
    assert grads[0].abs().max() > 0.01
    torch.testing.assert_close(grads[1], grads[0])


def test_the_clip_fraction_counts_tokens_whose_gain_the_clip_lowers() -> None:
    """A ratio outside the range is not clipped where that would raise the gain."""
    hidden, inputs, head = setup([4, 4])
    log_p = TokenScoreReading(1.0)(hidden.detach(), inputs, head)[0].detach()
    ratios = torch.tensor([1.5, 1.5, 0.5, 0.5, 1.1, 1.1, 0.9, 0.9])
    signs = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0, -1.0, 1.0, -1.0])
    inputs = replace(inputs, given={**inputs.given, "old": log_p - ratios.log(), "advantage": signs})
    objective = PolicyObjective(clip_low=0.2, clip_high=0.2)
    objective(hidden, inputs, head)
    sums = dict(zip(objective.measures.names, objective.measures.take(torch.zeros(())).tolist(), strict=True))
    assert sums["clip_fraction"] == 2


def test_the_loss_of_other_data_is_its_weighted_cross_entropy() -> None:
    hidden, inputs, head = setup([4, 2])
    shares = torch.arange(6) / 10
    objective = PolicyObjective(clip_low=0.2, clip_high=0.2, ptx=3.0, temperature=0.5)
    found = objective(hidden, replace(inputs, given={PTX: shares}), head).total
    log_p = head.linear(hidden).log_softmax(-1)[range(6), inputs.targets]
    torch.testing.assert_close(found, -3 * (shares * log_p).sum())


@pytest.mark.parametrize("by_answer", [False, True])
def test_measures_are_means_over_tokens_or_over_answers(by_answer: bool) -> None:
    hidden, inputs, head = setup([4, 2])
    log_p = TokenScoreReading(1.0)(hidden.detach(), inputs, head)[0]
    ratio = np.exp((log_p - inputs.given["old"]).detach().numpy())
    objective = PolicyObjective(clip_low=0.2, clip_high=0.2, kl=0.1, by_answer=by_answer)
    objective(hidden, inputs, head)
    sums = objective.measures.take(torch.zeros(())).tolist()
    found = objective.measures.means(sums, 2 if by_answer else 6)
    weights = np.repeat([1 / 4, 1 / 2], [4, 2]) if by_answer else None
    mean = np.average(ratio, weights=weights)
    assert found["ratio"] == pytest.approx(mean)
    assert found["ratio_variance"] == pytest.approx(np.average((ratio - mean) ** 2, weights=weights))
    difference = (log_p - inputs.given["reference"]).detach().numpy()
    k3 = np.exp(-difference) - 1 + difference
    assert k3.max() < LARGEST_K3 and found["loss_kl"] == pytest.approx(np.average(k3, weights=weights))


def test_a_process_without_answers_has_a_loss_of_zero_with_gradients() -> None:
    head = Head(nn.Linear(WIDTH, VOCABULARY, bias=False))
    hidden = torch.randn(0, WIDTH, requires_grad=True)
    loss = PolicyObjective(clip_low=0.2, clip_high=0.2, kl=0.1)(hidden, empty_row(CPU), head).total
    loss.backward()
    assert loss.item() == 0.0 and hidden.grad is not None


def bandit_kl(logits: Tensor, reference: Tensor) -> Tensor:
    p = logits.softmax(-1)
    return (p * (logits.log_softmax(-1) - reference.log_softmax(-1))).sum()


@pytest.mark.parametrize(("estimator", "right"), [("k2", True), ("k3+", True), ("k3", False), ("k1", False)])
def test_the_gradient_of_the_kl_on_a_bandit_of_five_arms(estimator: Any, right: bool) -> None:
    """In expectation over the arms, against finite differences of the reverse KL itself."""
    torch.manual_seed(3)
    logits, reference = torch.randn(5, requires_grad=True), torch.randn(5)
    log_p = logits.log_softmax(-1)
    estimates = kl_estimate(log_p, reference.log_softmax(-1), estimator)
    (log_p.detach().exp() * estimates).sum().backward()  # arms are sampled, so their weights have no gradient
    differences = torch.zeros(5)
    for i in range(5):
        step = torch.zeros(5)
        step[i] = 1e-6
        with torch.no_grad():
            differences[i] = (bandit_kl(logits + step, reference) - bandit_kl(logits - step, reference)) / 2e-6
    assert logits.grad is not None
    assert torch.allclose(logits.grad, differences, atol=1e-6) == right
    if estimator in ("k3", "k3+", "k1"):  # whose value is right
        value = (log_p.exp() * estimates).sum()
        torch.testing.assert_close(value, bandit_kl(logits, reference))


def test_k3_is_at_most_ten() -> None:
    """At a log-ratio of -3 it is e^3 - 4 = 16; there k3 has no gradient, and k3+ that of k2."""
    log_p = torch.tensor([-4.0, -2.0], requires_grad=True)
    reference = torch.tensor([-1.0, -1.0])
    assert kl_estimate(log_p, reference, "k3").tolist() == pytest.approx([10.0, np.e - 2.0])
    (slope,) = torch.autograd.grad(kl_estimate(log_p, reference, "k3").sum(), log_p)
    assert slope.tolist() == pytest.approx([0.0, 1.0 - np.e])
    assert torch.autograd.grad(kl_estimate(log_p, reference, "k3+").sum(), log_p)[0].tolist() == [-3.0, -1.0]


def test_values_of_targets_go_to_their_answers_and_back() -> None:
    beginning = np.arange(10, dtype=np.uint32)
    rows = [
        (np.append(beginning, tail).astype(np.uint32), np.arange(10 + len(tail)) >= 10)
        for tail in ([1, 2, 3], [4], [5, 6])
    ]
    inputs = pack([(np.array([9, 9, 7], np.uint32), np.array([False, False, True])), *rows], CPU, share=True)
    inputs = replace(inputs, given={"number": torch.arange(4)})
    values = by_rollout(inputs.targets[None].double(), inputs)
    assert {number: found[0].tolist() for number, found in values.items()} == {0: [7], 1: [1, 2, 3], 2: [4], 3: [5, 6]}
    columns = [values[number][0] for number in range(4)]
    assert by_target(inputs, {"again": columns})["again"].tolist() == inputs.targets.tolist()
