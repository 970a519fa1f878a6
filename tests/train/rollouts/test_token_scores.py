"""Values of answers beside the targets of passes, and back."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from stoker.models.attention.collate import SHORTEST_PREFIX, Inputs, pack
from stoker.models.head import TokenScores
from stoker.train.rollouts.token_scores import TrainedScores, by_rollout, by_target

LENGTHS = (2, 3, 1)  # of answers
SHARED = list(range(2 * SHORTEST_PREFIX))


def laid_out() -> Inputs:
    """Three answers, of which the first and the last share their prompt, so that the second comes after them."""
    rows = []
    for prompt, length in zip((SHARED, [1, 2], SHARED), LENGTHS, strict=True):
        rows.append((np.array([*prompt, *range(length)]), np.arange(len(prompt) + length) >= len(prompt)))
    inputs = pack(rows, torch.device("cpu"), share=True)
    assert inputs.documents.tolist() == [0, 0, 2, 1, 1, 1]
    return replace(inputs, given={"number": torch.tensor([4, 7, 9])})


def test_values_lie_beside_the_targets_of_their_answers() -> None:
    inputs = laid_out()
    values = [10.0 * row + np.arange(n) for row, n in enumerate(LENGTHS)]
    given = by_target(inputs, {"value": values})["value"]
    assert given.tolist() == [0, 1, 20, 10, 11, 12]
    back = by_rollout(given[None], inputs)
    assert {number: found[0].tolist() for number, found in back.items()} == {
        number: own.tolist() for number, own in zip((4, 7, 9), values, strict=True)
    }


def test_scores_of_a_step_are_given_once() -> None:
    scores, inputs = TrainedScores(), laid_out()
    scores.add(inputs, TokenScores(torch.arange(6.0), torch.ones(6)))
    assert {number: found[0].tolist() for number, found in scores.take().items()} == {4: [0, 1], 9: [2], 7: [3, 4, 5]}
    assert scores.take() == {}
