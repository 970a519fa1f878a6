"""Keys and values of running answers in pages of a pool, so that memory and attention follow each row's own length.

Shapes: B rows of a pass, L pages of the longest row, G key-value heads, T tokens, K head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from stoker.generate.page_pool import PagePool
from stoker.generate.row_cache import Kept
from stoker.models.attention.packed_row import active_row, within
from stoker.models.attention.paged_rows import PAGE, PagedRows

COLUMNS = 64  # pages of a row in the smallest table


class _Layer(CacheLayerMixin):
    """Writes a pass' keys and values of one layer into the pool."""

    is_sliding = False

    def __init__(self, pool: PagePool, number: int) -> None:
        super().__init__()
        self.pool, self.number = pool, number

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """The pool is allocated when the first row is added."""

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        rows = active_row()
        assert isinstance(rows, PagedRows)
        keys, values = self.pool.layers[self.number]
        rows.write(keys, key_states)
        rows.write(values, value_states)
        return keys, values

    def get_seq_length(self) -> int:
        return 0  # models take positions and masks from the pass

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_max_length(self) -> int:
        return -1


class PagedCache(Cache):
    """Keys and values of rows that take one token a pass; see `RowCache` for the same methods.

    Attributes:
        lengths: tokens of each row.
        rows: those of the current pass, and the rows that fill the batch.
    """

    def __init__(self, layers: int, pool: PagePool) -> None:
        super().__init__(layers=[_Layer(pool, number) for number in range(layers)])
        self.pool = pool
        self.lengths: list[int] = []
        self.rows: PagedRows | None = None
        self._pages: list[list[int]] = []
        self._table = np.zeros((1, COLUMNS), dtype=np.int64)
        self._table_BL: Tensor | None = None  # the same on the device; None if it has changed

    @staticmethod
    def tokens_for(lengths: Sequence[int]) -> int:
        """Returns the tokens for which rows of these lengths take memory."""
        return sum(_pages_for(length) for length in lengths) * PAGE

    def begin(self, tokens: int, device: torch.device) -> tuple[None, Tensor]:
        """Takes pages for the tokens of a pass; see `RowCache.begin`.

        Returns:
            (no mask, positions of the tokens, shape (B, 1)). Rows that fill the batch follow the others: kernels are
            compiled for each number of rows, so it is a power of two.
        """
        assert tokens == 1
        for row, length in enumerate(self.lengths):
            self._cover(row, length + 1)
        batch = power_of_two(len(self.lengths))
        if self._table_BL is None or len(self._table_BL) != batch:
            self._table_BL = torch.from_numpy(self._table[:batch]).to(device, copy=True)
        after = [length + 1 for length in self.lengths] + [0] * (batch - len(self.lengths))
        self.rows = PagedRows(self._table_BL, torch.tensor(after, device=device), self.pool.pages)
        return None, self.rows.positions_B[:, None]

    def at_hand(self) -> AbstractContextManager[None]:
        """Context of the pass: attention reads the pages."""
        return within(self.rows)

    def advance(self, tokens: int) -> None:
        """Ends a pass."""
        self.lengths = [length + tokens for length in self.lengths]

    def add(self, kept: Kept) -> None:
        """Adds a row."""
        self.pool.hold(kept)
        self.lengths.append(kept[0][0].shape[1])
        self._pages.append([])
        self._reserve(len(self.lengths), self._table.shape[1])
        self._cover(len(self.lengths) - 1, self.lengths[-1])
        slots_T = self._slots(len(self.lengths) - 1, kept[0][0].device)
        for pools, states in zip(self.pool.layers, kept, strict=True):
            for pool_1GTK, states_GTK in zip(pools, states, strict=True):
                pool_1GTK.index_copy_(2, slots_T, states_GTK[None].to(pool_1GTK.dtype))

    def kept(self, row: int) -> Kept:
        """Returns a copy of a row's keys and values."""
        slots_T = self._slots(row, self.pool.layers[0][0].device)
        layers = self.pool.layers
        return tuple((keys[0].index_select(1, slots_T), values[0].index_select(1, slots_T)) for keys, values in layers)

    def drop(self, row: int) -> None:
        """Removes a row and frees its pages; the last row takes its index."""
        self.pool.give(self._pages[row])
        last = len(self.lengths) - 1
        self.lengths[row], self._pages[row] = self.lengths[last], self._pages[last]
        self._table[row] = self._table[last]
        self._table[last] = 0
        self.lengths.pop()
        self._pages.pop()
        self._table_BL = None

    def _cover(self, row: int, tokens: int) -> None:
        """Takes pages until a row has some for these tokens."""
        pages = self._pages[row]
        while len(pages) < _pages_for(tokens):
            self._reserve(len(self.lengths), len(pages) + 1)
            pages.append(self.pool.take())
            self._table[row, len(pages) - 1] = pages[-1]
            self._table_BL = None

    def _reserve(self, rows: int, columns: int) -> None:
        """Makes the table as large as rows and pages need."""
        height, width = self._table.shape
        if rows > height or columns > width:
            larger = np.zeros((power_of_two(max(rows, height)), power_of_two(max(columns, width))), dtype=np.int64)
            larger[:height, :width] = self._table
            self._table = larger

    def _slots(self, row: int, device: torch.device) -> Tensor:
        """Returns where a row's tokens are in the pool, shape (T,)."""
        place_T = np.arange(self.lengths[row])
        return torch.from_numpy(self._table[row, place_T // PAGE] * PAGE + place_T % PAGE).to(device)


def power_of_two(least: int) -> int:
    """Returns the smallest power of two that is not below a number."""
    return 1 << (least - 1).bit_length()


def _pages_for(tokens: int) -> int:
    return -(-tokens // PAGE)
