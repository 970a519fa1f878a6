"""Per-token scores of answers, from forward passes before a step or from those that train on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from stoker.models.attention.collate import Inputs
from stoker.models.head import Head, LogitsHead, TokenScores


@dataclass(frozen=True)
class TokenScoreReading:
    """A `stoker.models.objective.Reading` of the log-probability of each target, and of the entropy, shape (2, N).

    Attributes:
        temperature: divides the logits.
        entropy: whether the entropy is read; otherwise the shape is (1, N).
    """

    temperature: float
    entropy: bool = True

    def __call__(self, hidden_ND: Tensor, inputs: Inputs, head: Head | LogitsHead) -> Tensor:
        scores = head.tempered(self.temperature).scores(hidden_ND, inputs.targets, entropy=self.entropy)
        return torch.stack([found for found in (scores.log_probability, scores.entropy) if found is not None])


class TrainedScores:
    """The log-probability and entropy of each target of the passes that train on answers without ``old``.

    Where an iteration is one optimizer step, the policy of its passes is the one that sampled, so that these values are
    those of a pass before the step.
    """

    def __init__(self) -> None:
        self._passes: list[tuple[Inputs, Tensor]] = []

    def add(self, inputs: Inputs, scores: TokenScores) -> None:
        """Keeps the scores of a pass."""
        assert scores.entropy is not None
        self._passes.append((inputs, torch.stack((scores.log_probability, scores.entropy)).detach()))

    def take(self) -> dict[int, np.ndarray]:
        """Returns the scores since the last call, each array of shape (2, answer tokens); see `by_rollout`."""
        passes, self._passes = self._passes, []
        return {number: values for inputs, scores in passes for number, values in by_rollout(scores, inputs).items()}


def by_rollout(values_XN: Tensor, inputs: Inputs) -> dict[int, np.ndarray]:
    """Splits target values by answer: maps the row's number in `Inputs.given` to an array (X, answer tokens)."""
    numbers, documents, values_XN = inputs.given["number"].tolist(), inputs.documents.cpu(), values_XN.cpu()
    return {number: values_XN[:, documents == row].numpy() for row, number in enumerate(numbers)}


def by_target(inputs: Inputs, columns: Mapping[str, Sequence[np.ndarray]]) -> dict[str, Tensor]:
    """Concatenates values of answers in the order of their tokens in `Inputs.targets`; the inverse of `by_rollout`.

    Args:
        columns: by name, an array for each row of the inputs, shape (answer tokens,).
    """
    documents = inputs.documents.cpu().numpy()
    order = documents[np.flatnonzero(np.diff(documents, prepend=-1))]  # a row's targets follow each other
    device = inputs.documents.device
    return {
        name: torch.as_tensor(np.concatenate([arrays[row] for row in order]), device=device)
        for name, arrays in columns.items()
    }
