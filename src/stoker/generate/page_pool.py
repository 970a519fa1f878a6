"""Pool of pages of keys and values, which the rows of all batches share.

Shapes: G key-value heads, T tokens of all pages, K head size.
"""

from __future__ import annotations

from torch import Tensor

from stoker.generate.row_cache import Kept
from stoker.models.attention.paged_rows import PAGE
from stoker.models.autocast import autocast_dtype

GROWTH = 4  # a larger pool has other addresses, for which kernels are compiled again
SMALLEST = 64  # pages


class PagePool:
    """Keys and values of one page of each layer are one unit. Page 0 belongs to no row.

    Attributes:
        layers: keys and values of all pages, for each layer, both of shape (1, G, T, K); empty before `hold`.
        pages: number of pages.
    """

    def __init__(self, memory: int) -> None:
        self.layers: list[tuple[Tensor, Tensor]] = []
        self.pages = 0
        self._memory, self._largest = memory, 0
        self._free: list[int] = []

    @property
    def used(self) -> int:
        """Pages in use by rows."""
        return max(0, self.pages - 1 - len(self._free))

    def hold(self, kept: Kept) -> None:
        """Allocates the first pages for keys and values of these shapes."""
        if self.layers:
            return
        self.layers = [(_empty(keys), _empty(values)) for keys, values in kept]
        token_bytes = sum(x.shape[1] * x.shape[3] * x.itemsize for layer in self.layers for x in layer)
        self._largest = self._memory // (PAGE * token_bytes)
        self._grow()

    def take(self) -> int:
        """Returns a free page."""
        if not self._free:
            self._grow()
        return self._free.pop()

    def give(self, pages: list[int]) -> None:
        """Frees pages."""
        self._free += pages

    def _grow(self) -> None:
        pages = max(SMALLEST, GROWTH * self.pages)
        if pages > self._largest:  # the engine keeps more rows than one below it
            pages = max(self._largest, self.pages + SMALLEST)
        for number, layer in enumerate(self.layers):  # one layer at a time is in memory twice
            keys, values = (_longer(x, pages * PAGE) for x in layer)
            self.layers[number] = keys, values
        self._free += range(pages - 1, max(1, self.pages) - 1, -1)
        self.pages = pages


def _empty(kept_GTK: Tensor) -> Tensor:
    """Returns no token in the type of products, in which attention reads the pool without a conversion."""
    heads, _, size = kept_GTK.shape
    return kept_GTK.new_zeros(1, heads, 0, size, dtype=autocast_dtype(kept_GTK) or kept_GTK.dtype)


def _longer(x_1GTK: Tensor, tokens: int) -> Tensor:
    longer = x_1GTK.new_zeros(*x_1GTK.shape[:2], tokens, x_1GTK.shape[3])
    longer[:, :, : x_1GTK.shape[2]] = x_1GTK
    return longer
