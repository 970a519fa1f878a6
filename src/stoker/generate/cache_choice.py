"""Where the keys and values of running answers are: in pages on a GPU, else in a rectangle of rows."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from time import perf_counter
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from stoker.errors import typed_reason
from stoker.generate.decoder import Decoder
from stoker.generate.page_pool import PagePool
from stoker.generate.paged_cache import PagedCache
from stoker.generate.row_cache import SPARE, RowCache
from stoker.models.language_model import close

ROUNDS = 4  # measured steps with each cache; the fastest counts, as the first with pages may record a graph
# Pages are used up to this relative time of a step. Rows take up to this factor more memory, so at the same speed fewer
# answers fit, and the first step, of rows that have just begun, hides that pages read no further than each row's end.
SLOWEST = SPARE

_measured = WeakKeyDictionary[nn.Module, bool]()  # whether a model's steps with pages were right and fast enough

Step = Callable[[RowCache | PagedCache], Tensor]
"""Runs a step of decoding with a cache; returns the logits."""


class CacheChoice:
    """Makes the caches of an engine's batches."""

    def __init__(self, decoder: Decoder, memory: int, *, paged: bool | None = None) -> None:
        """
        Args:
            memory: bytes for keys and values.
            paged: whether they are in pages; by default on a GPU, for models whose attention can read pages, and
                unless rows are faster. States and the keys of indexers are never in pages.
        """
        self._decoder = decoder
        self._measures = paged is None
        # A run makes an engine for each round of answers, and the first one's measurement holds for all.
        self._accepted = _measured.get(decoder.model) if self._measures else None
        wanted = reads_pages(decoder) and self._accepted is not False if paged is None else paged
        self._paged = wanted and not decoder.state_layers and not decoder.indexed_layers
        self._pool = PagePool(memory)

    def new(self) -> RowCache | PagedCache:
        """Returns an empty cache."""
        return PagedCache(self._decoder.layers, self._pool) if self._paged else self._decoder.new_rows()

    def tokens_for(self, lengths: Sequence[int]) -> int:
        """Returns the tokens for which rows of these lengths take memory."""
        return (PagedCache if self._paged else RowCache).tokens_for(lengths)

    def usable(self, cache: RowCache | PagedCache, ids_B1: Tensor, step: Step) -> RowCache | PagedCache:
        """Returns the cache for a step; rows instead of pages, for good, if the first step with pages fails, differs or
        is slow.

        To find out, that step is computed with both.
        """
        if isinstance(cache, RowCache) or self._accepted:
            return cache
        rows = self._decoder.new_rows()
        for row in range(len(cache.lengths)):
            rows.add(cache.kept(row))
        if self._accepted is None and self._accepts(ids_B1, cache, rows, step):
            return cache
        while cache.lengths:
            cache.drop(len(cache.lengths) - 1)
        return rows

    def _accepts(self, ids_B1: Tensor, cache: PagedCache, rows: RowCache, step: Step) -> bool:
        problem = self._problem(ids_B1, cache, rows) or (self._delay(cache, rows, step) if self._measures else "")
        if problem:
            print(f"answers are generated without paged attention ({problem})", file=sys.stderr, flush=True)
            self._paged = False
        self._accepted = not problem
        if self._measures:
            _measured[self._decoder.model] = self._accepted
        return self._accepted

    def _problem(self, ids_B1: Tensor, cache: PagedCache, rows: RowCache) -> str:
        """Returns how the step with pages fails or differs; empty if it does neither."""
        expected = self._decoder.preview(ids_B1, rows)
        try:
            return "" if close(self._decoder.preview(ids_B1, cache), expected) else "other logits"
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # from a compiler
            return typed_reason(error)

    def _delay(self, cache: PagedCache, rows: RowCache, step: Step) -> str:
        """Returns how much longer a step with pages takes; empty unless it is clearly slower."""
        paged, plain = (self._seconds(step, each) for each in (cache, rows))
        return "" if paged <= SLOWEST * plain else f"a step takes {paged / plain:.1f} times as long as with rows"

    def _seconds(self, step: Step, cache: RowCache | PagedCache) -> float:
        """Measures a step, by the fastest of several rounds. The cache does not advance."""
        seconds = []
        for _ in range(ROUNDS):
            self._wait()
            begin = perf_counter()
            step(cache)
            self._wait()
            seconds.append(perf_counter() - begin)
            cache.advance(-1)
        return min(seconds)

    def _wait(self) -> None:
        if self._decoder.device.type == "cuda":
            torch.cuda.synchronize(self._decoder.device.torch)


def reads_pages(decoder: Decoder) -> bool:
    """Returns whether a model's attention is that of packed rows, in one process, and compiles for its GPU."""
    packs = decoder.language.packs and decoder.others is None
    return packs and decoder.device.type == "cuda" and find_spec("triton") is not None
