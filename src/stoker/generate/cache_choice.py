"""Where the keys and values of running answers are: in pages on a GPU, else in a rectangle of rows."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec

import torch
from torch import Tensor

from stoker.generate.decoder import Decoder
from stoker.generate.page_pool import PagePool
from stoker.generate.paged_cache import PagedCache
from stoker.generate.row_cache import RowCache
from stoker.models.language_model import close


class CacheChoice:
    """Makes the caches of an engine's batches."""

    def __init__(self, decoder: Decoder, memory: int, *, paged: bool | None = None) -> None:
        """
        Args:
            memory: bytes for keys and values.
            paged: whether they are in pages; by default on a GPU, for models whose attention can read pages.
        """
        self._decoder = decoder
        self._paged = reads_pages(decoder) and decoder.device.type == "cuda" if paged is None else paged
        self._pool = PagePool(memory)
        self._agrees: bool | None = None

    def new(self) -> RowCache | PagedCache:
        """Returns an empty cache."""
        layers = self._decoder.layers
        return PagedCache(layers, self._pool) if self._paged else RowCache(layers)

    def tokens_for(self, lengths: Sequence[int]) -> int:
        """Returns the tokens for which rows of these lengths take memory."""
        return (PagedCache if self._paged else RowCache).tokens_for(lengths)

    def usable(self, cache: RowCache | PagedCache, ids_B1: Tensor) -> RowCache | PagedCache:
        """Returns the cache for a step; rows instead of pages, for good, if the first step with pages fails or differs.

        To find out, that step is computed with both.
        """
        if isinstance(cache, RowCache) or self._agrees:
            return cache
        rows = RowCache(self._decoder.layers)
        for row in range(len(cache.lengths)):
            rows.add(cache.kept(row))
        if self._agrees is None and self._compare(ids_B1, cache, rows):
            return cache
        while cache.lengths:
            cache.drop(len(cache.lengths) - 1)
        return rows

    def _compare(self, ids_B1: Tensor, cache: PagedCache, rows: RowCache) -> bool:
        expected = self._decoder.preview(ids_B1, rows)
        try:
            problem = "" if close(self._decoder.preview(ids_B1, cache), expected) else "other logits"
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # from a compiler
            problem = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        if problem:
            print(f"answers are generated without paged attention ({problem})", file=sys.stderr, flush=True)
            self._paged = False
        self._agrees = not problem
        return self._agrees


def reads_pages(decoder: Decoder) -> bool:
    """Returns whether a model's attention is that of packed rows, in one process, and can be compiled here."""
    return decoder.language.packs and decoder.others is None and find_spec("triton") is not None
