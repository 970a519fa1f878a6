"""The training objective: a loss of the predicting hidden states, the targets and the head.

Tasks pass in their objective; layouts call it where the head is.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from stoker.models.collate import Inputs
from stoker.models.head import Head, LogitsHead


class Loss(NamedTuple):
    """The loss of a forward pass.

    Attributes:
        total: summed over the targets, 0-d, with gradient.
        correct: number of targets that were predicted right, 0-d; None where that is undefined.
    """

    total: Tensor
    correct: Tensor | None


class Objective(Protocol):
    """The loss of a forward pass, over the targets of this process.

    A loss of whole documents sums with `Inputs.sum_by_document` and ends with `Inputs.counted_once`, so that it is
    right where several processes share a row.
    """

    def __call__(self, hidden_ND: Tensor, inputs: Inputs, head: Head | LogitsHead) -> Loss:
        """
        Args:
            hidden_ND: the last hidden states at ``inputs.predict``; logits for a `LogitsHead`.
        """


def next_token(hidden_ND: Tensor, inputs: Inputs, head: Head | LogitsHead) -> Loss:
    """The cross entropy of each target."""
    return Loss(*head.cross_entropy(hidden_ND, inputs.targets))
