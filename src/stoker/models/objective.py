"""The training objective: a loss of the predicting hidden states, the targets and the head.

A task passes its objective in; layouts call it where the head is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from stoker.hardware.process_device import widest_float
from stoker.models.attention.collate import Inputs
from stoker.models.head import Head, LogitsHead


class Loss(NamedTuple):
    """The loss of a forward pass.

    Attributes:
        total: summed over the targets, 0-d, with gradient.
        correct: number of targets that were predicted right, 0-d; None if that is undefined.
    """

    total: Tensor
    correct: Tensor | None


class Objective(Protocol):
    """The loss of a forward pass, over the targets of this process.

    A loss of whole documents sums with `Inputs.sum_by_document` and ends with `Inputs.counted_once`, so that it is
    right where several processes share a row. An objective with an attribute ``measures`` has more to report than its
    loss; see `Measures`.
    """

    def __call__(self, hidden_ND: Tensor, inputs: Inputs, head: Head | LogitsHead) -> Loss:
        """
        Args:
            hidden_ND: the last hidden states at ``inputs.predict``; logits for a `LogitsHead`.
        """


class Reading(Protocol):
    """A function of a forward pass without gradients; called where the head is, as an `Objective` is."""

    def __call__(self, hidden_ND: Tensor, inputs: Inputs, head: Head | LogitsHead) -> Tensor:
        """See `Objective`."""


class Measures:
    """Metrics that an objective sums over targets, in addition to its loss.

    Each process sums over its own passes; `stoker.train.nonfinite_guard` sums over the processes, and
    `stoker.train.step` divides by the step's targets.
    """

    def __init__(self, *names: str) -> None:
        self.names = names
        self._sums: Tensor | None = None  # None before the first pass: copying zeros to the device makes the host wait

    def add(self, inputs: Inputs, **values: Tensor) -> None:
        """Adds to the sums.

        Args:
            inputs: of the pass.
            values: 0-d, by name, the same on all processes that share the row; missing names add nothing.
        """
        none = next(iter(values.values())).detach() * 0
        now = torch.stack([inputs.counted_once(values.get(name, none).detach()) for name in self.names])
        now = now.to(widest_float(now.device))
        self._sums = now if self._sums is None else self._sums + now

    def take(self, like: Tensor) -> Tensor:
        """Returns the sums since the last call, shape (names,), in the type and on the device of a tensor."""
        sums, self._sums = self._sums, None
        return like.new_zeros(len(self.names)) if sums is None else sums.to(like.device).to(like.dtype)

    def means(self, sums: Sequence[float], targets: int) -> dict[str, float]:
        """Returns the reported metrics, from the sums of all processes; by default each sum divided by the targets."""
        return {name: value / max(1, targets) for name, value in zip(self.names, sums, strict=True)}


def likeliest(hidden_ND: Tensor, inputs: Inputs, head: Head | LogitsHead) -> Tensor:
    """Returns the most likely token after each predicting position, shape (N,)."""
    return head.likeliest(hidden_ND)


def next_token(hidden_ND: Tensor, inputs: Inputs, head: Head | LogitsHead) -> Loss:
    """Returns the cross entropy of each target."""
    return Loss(*head.cross_entropy(hidden_ND, inputs.targets))
