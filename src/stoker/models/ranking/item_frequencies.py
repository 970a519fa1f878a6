"""How often each item is in a batch, estimated from the batches (Yi et al., 2019, Algorithm 2)."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class ItemFrequencies(nn.Module):
    """For each cell, the last step that had one of its items (A of the paper) and the mean steps from one such step to
    the next (B).

    The first gap of a cell is its first mean. The paper weighs it by the rate too, and starts from a given mean.

    Args:
        cells: number of cells, to which ids are hashed (H of the paper); rows without an item have the cell ``cells``.
        rate: weight of the newest gap (alpha of the paper).
    """

    steps: Tensor
    last: Tensor
    gap: Tensor

    def __init__(self, cells: int, rate: float) -> None:
        super().__init__()
        self.cells, self._rate = cells, rate
        self.register_buffer("steps", torch.zeros(1, dtype=torch.int64))
        self.register_buffer("last", torch.zeros(cells + 1, dtype=torch.int64))
        self.register_buffer("gap", torch.zeros(cells + 1))

    @torch.no_grad()
    def update(self, cells: Tensor) -> None:
        """Counts a step that has items of these cells."""
        self.steps += 1
        gap, last = self.gap[cells], self.last[cells]
        newest = (self.steps - last).to(gap.dtype)
        # Rows with the same cell write the same values, so their order does not matter.
        self.gap[cells] = torch.where(last == 0, newest, gap.lerp(newest, self._rate))
        self.last[cells] = self.steps
        self.last[self.cells], self.gap[self.cells] = 0, 0.0  # some layouts have more of these rows

    def log_probabilities(self, cells: Tensor) -> Tensor:
        """Returns the logarithm of the probability that a step has an item of each cell.

        An item that no step had is taken to occur once in the steps so far.
        """
        gap = torch.where(self.last[cells] == 0, self.steps.to(self.gap.dtype), self.gap[cells])
        return -gap.clamp(min=1).log()
