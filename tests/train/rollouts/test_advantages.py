"""Advantages against their definitions, computed the long way."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_allclose

from stoker.train.rollouts.advantages import gae, leave_one_out, of_group, to_go, whitened
from stoker.train.rollouts.iteration_plan import IterationPlan


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 1.0), (0.97, 0.0)])
def test_gae_is_the_weighted_sum_of_temporal_differences(gamma: float, lam: float) -> None:
    random = np.random.default_rng(0)
    rewards, values = random.normal(size=7), random.normal(size=7)
    advantages, returns = gae(rewards, values, gamma=gamma, lam=lam)
    after = np.append(values[1:], 0.0)  # nothing is to be had after the last token
    deltas = rewards + gamma * after - values
    for t in range(7):
        expected = sum((gamma * lam) ** k * deltas[t + k] for k in range(7 - t))
        assert advantages[t] == pytest.approx(expected, rel=1e-12)
    assert_allclose(returns, advantages + values)


def test_with_lambda_one_a_return_is_the_discounted_sum_of_rewards() -> None:
    rewards, values = np.array([0.0, 1.0, -2.0, 4.0]), np.array([3.0, 1.0, 0.5, 2.0])
    _, returns = gae(rewards, values, gamma=0.5, lam=1.0)
    assert_allclose(returns, to_go(rewards, 0.5))
    assert_allclose(to_go(rewards, 0.5), [0.5 - 0.5 + 0.5, 1.0 - 1.0 + 1.0, -2.0 + 2.0, 4.0])


def test_whitening_is_over_all_answers_and_keeps_the_mean_where_asked() -> None:
    values = [np.array([1.0, 2.0]), np.array([6.0])]
    shifted, kept = np.concatenate(whitened(values, shift=True)), np.concatenate(whitened(values, shift=False))
    everything = np.array([1.0, 2.0, 6.0])
    assert_allclose(shifted, (everything - 3) / everything.std(ddof=1), rtol=1e-6)
    assert_allclose(kept, shifted + 3)
    assert_allclose(whitened([np.array([1.0, 3.0])], shift=True)[0], np.array([-1.0, 1.0]) / np.sqrt(2), rtol=1e-6)
    assert np.isfinite(whitened([np.array([5.0])], shift=True)[0]).all()


def test_float32_is_whitened_in_float64() -> None:
    random = np.random.default_rng(0)
    values = [(1000 + random.normal(size=1000)).astype(np.float32) for _ in range(3)]
    everything = np.concatenate(values).astype(np.float64)
    found = np.concatenate(whitened(values, shift=True))
    assert_allclose(found, (everything - everything.mean()) / everything.std(ddof=1), rtol=0, atol=1e-6)


def test_advantages_of_groups() -> None:
    scores = np.array([1.0, 0.0, 0.0, 1.0, 3.0])
    others = [np.delete(scores, i).mean() for i in range(5)]
    assert_allclose(leave_one_out(scores), scores - others)
    assert_allclose(of_group(scores, scaled=False), scores - 1.0)
    assert_allclose(of_group(scores, scaled=True), (scores - 1.0) / scores.std(ddof=1), rtol=1e-3)
    assert_allclose(of_group(np.ones(4), scaled=True), np.zeros(4))


@pytest.mark.parametrize("batch", [24, 12, 6, 4])
def test_every_answer_is_learnt_from_once_in_each_epoch(batch: int) -> None:
    plan = IterationPlan(prompts=6, answers=4, epochs=3, batch=batch, seed=1)
    seen = [plan.chosen(first, first + batch, 24) for first in range(0, plan.samples, batch)]
    for epoch in range(3):
        answers = [i for step in seen[epoch * 24 // batch : (epoch + 1) * 24 // batch] for i in step]
        assert sorted(answers) == list(range(24))
    if batch == 12:  # whole groups of answers to one prompt
        assert all(sorted(step[i : i + 4]) == list(range(step[i], step[i] + 4)) for step in seen for i in (0, 4, 8))
        assert seen[:2] != seen[2:4]


def test_each_iteration_has_an_order_of_its_own_in_which_groups_stay_together_for_whole_steps_alone() -> None:
    def order(batch: int, iteration: int = 0) -> list[int]:
        plan = IterationPlan(prompts=6, answers=4, epochs=3, batch=batch, seed=1)
        return [int(answer) for answer in plan.order(iteration, 0, 24)]

    def in_groups(answers: list[int]) -> bool:
        return all(answers[i : i + 4] == list(range(answers[i], answers[i] + 4)) for i in range(0, 24, 4))

    assert in_groups(order(12)) and not in_groups(order(6))
    assert order(12) != order(12, iteration=1)
    assert order(24) == order(32) == list(range(24))


def test_the_order_of_an_epoch_is_computed_once_for_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = IterationPlan(prompts=6, answers=4, epochs=3, batch=20, seed=1)
    orders = [plan.order(0, epoch, 24) for epoch in range(3)]
    computed = []
    monkeypatch.setattr(IterationPlan, "order", lambda _, i, epoch, n: (computed.append(epoch), orders[epoch])[1])
    assert plan.chosen(20, 40, 24) == [int(answer) for answer in [*orders[0][20:], *orders[1][:16]]]
    assert computed == [0, 1]
    assert plan.chosen(48, 60, 24) == orders[2][:12].tolist() and computed == [0, 1, 2]


def test_the_last_iteration_may_be_smaller() -> None:
    plan = IterationPlan(prompts=6, answers=2, epochs=2, batch=4, seed=1)
    assert plan.total(15) == 2 * 24 + 3 * 2 * 2
    assert plan.place(49) == (2, 1)
    assert sorted(plan.chosen(48, 54, 6) + plan.chosen(54, 60, 6)) == sorted([*range(6), *range(6)])
