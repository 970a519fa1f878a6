"""The robust z-score against its definition, and what counts as a spike."""

from __future__ import annotations

import math

import numpy as np
import pytest

from stoker.job.blocks.faults_block import FaultsBlock
from stoker.train.engine import Counts
from stoker.train.faults.anomaly_policy import MOST_IN_A_ROW, AnomalyPolicy, is_spike, robust_z
from stoker.train.step import StepResult

CALM = [2.0 + 0.05 * (-1) ** i + 0.01 * (i % 5) for i in range(64)]


def test_the_score_is_that_of_numpy() -> None:
    before = np.random.default_rng(0).normal(3.0, 0.5, 64)
    deviation = 1.4826 * np.median(np.abs(before - np.median(before)))
    assert robust_z(5.0, before.tolist()) == pytest.approx((5.0 - np.median(before)) / deviation)
    assert deviation == pytest.approx(0.5, rel=0.2)  # it estimates the standard deviation


def test_one_earlier_spike_hides_none() -> None:
    assert is_spike(6.0, [*CALM, 9.0], 6.0) and not is_spike(2.1, [*CALM, 9.0], 6.0)


def test_a_fall_is_no_spike() -> None:
    assert not is_spike(0.1, CALM, 3.0)


def test_losses_that_hardly_differ_do_not_make_one_of_noise() -> None:
    same = [2.0] * 64
    assert not is_spike(2.001, same, 6.0) and is_spike(2.5, same, 6.0)


def test_never_without_a_threshold_or_enough_to_compare_with() -> None:
    assert not is_spike(100.0, CALM, 0.0)
    assert not is_spike(100.0, CALM[:7], 6.0) and is_spike(100.0, CALM[:8], 6.0)


def step_of(loss: float, *, wrong: bool = False) -> StepResult:
    return StepResult(
        1, (0, 1), Counts(1, 1, 1, 1), loss, grad_norm=1.0, lr=0.1, taken=not wrong, wrong=wrong, asked=False,
        data_seconds=0.0, seconds=1.0,
    )  # fmt: skip


def test_a_loss_is_compared_with_those_of_the_window() -> None:
    policy = AnomalyPolicy(FaultsBlock(spike=6.0, window=8))
    recent: list[float] = []
    for step in range(12):
        recent = policy.remembered(recent, step_of(float(step)))
    assert recent == [4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0]
    assert AnomalyPolicy(FaultsBlock(spike=0.0)).remembered(recent, step_of(1.0)) == []


def test_only_steps_in_a_row_that_are_left_out_end_a_run() -> None:
    policy, wrong = AnomalyPolicy(FaultsBlock(not_finite="skip")), step_of(math.nan, wrong=True)
    for _ in range(3):
        assert [policy.answer(wrong, []) for _ in range(MOST_IN_A_ROW)] == ["skip"] * MOST_IN_A_ROW
        assert policy.answer(step_of(1.0), []) == "fine"
    assert [policy.answer(wrong, []) for _ in range(MOST_IN_A_ROW + 1)] == ["skip"] * MOST_IN_A_ROW + ["stop"]


def test_rollbacks_that_are_further_apart_than_the_window_are_at_different_places() -> None:
    policy = AnomalyPolicy(FaultsBlock(spike=6.0, window=8))
    for step in range(10, 100, 9):
        assert policy.goes_back_before(step) == step
        policy.went_back(step, step - 4)
    assert policy.goes_back_before(99) == 87  # before the state that the rollback from step 91 restored
