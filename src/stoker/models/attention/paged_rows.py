"""One token each of rows whose keys and values are in pages of a common pool.

Shapes: B rows, L pages of the longest row, N pages of the pool, G key-value heads, P tokens of a page, K head size.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

PAGE = 128  # tokens of a page: the smallest block of keys that FlexAttention skips


@dataclass(frozen=True)
class PagedRows:
    """The rows of a pass with one token a row.

    All that is derived from the two tensors is computed on the device, in the first layer, and used in all.

    Attributes:
        table_BL: the pages of each row in their order; 0, a page of no row, behind them.
        lengths_B: tokens of each row, the pass' own included; 0 for a row that only fills the batch.
        pages: pages of the pool.
        masks: the mask of the pages that each row reads, by the window and the chunk of a layer.
    """

    table_BL: Tensor
    lengths_B: Tensor
    pages: int
    masks: dict[tuple[int | None, int | None], Any] = field(default_factory=dict)

    @property
    def positions_B(self) -> Tensor:
        """Positions of the pass' tokens."""
        return (self.lengths_B - 1).clamp(min=0)

    def write(self, pool_1GTK: Tensor, states_BG1K: Tensor) -> None:
        """Writes the keys or values of the pass' tokens; those of rows that fill the batch go to page 0."""
        pool_1GTK.index_copy_(2, self._slots_B, states_BG1K.permute(2, 1, 0, 3).to(pool_1GTK.dtype))

    @cached_property
    def _slots_B(self) -> Tensor:
        """The places of the pass' tokens in the pool."""
        positions_B = self.positions_B
        page_B1 = self.table_BL.gather(1, (positions_B // PAGE)[:, None])
        return page_B1[:, 0] * PAGE + positions_B % PAGE

    @cached_property
    def owners(self) -> tuple[Tensor, Tensor]:
        """The row of each page of the pool, -1 without, and the position of its first token, shapes (N,)."""
        batch, longest = self.table_BL.shape
        device = self.table_BL.device
        used_BL = self.table_BL.flatten()
        rows_BL = torch.arange(batch, device=device)[:, None].expand(batch, longest).flatten()
        firsts_BL = torch.arange(0, longest * PAGE, PAGE, device=device).repeat(batch)
        owner_N = torch.full((self.pages,), -1, device=device).scatter_(0, used_BL, rows_BL)
        owner_N[:1].fill_(-1)
        return owner_N, torch.zeros_like(owner_N).scatter_(0, used_BL, firsts_BL)
