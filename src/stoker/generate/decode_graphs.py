"""CUDA graphs of decoding steps: one call launches all kernels of a step, whose time is otherwise that of the host.

A graph repeats the kernels that it has recorded, on the same addresses. So a step is recorded once for each adapter,
number of rows, and size of the page table and of the pool, and its ids, page table and lengths are copied into the
tensors of the recording. Kernels read the weights when they run, so a graph is right after an update in place.

Shapes: B rows with those that fill the batch, L pages of the longest row, V vocabulary.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from weakref import WeakSet

import torch
from torch import Tensor, nn

from stoker.errors import reason_of
from stoker.generate.decoder import Decoder, filled
from stoker.generate.paged_cache import PagedCache
from stoker.generate.row_cache import RowCache
from stoker.models.attention.paged_rows import PagedRows
from stoker.models.critic import is_of_critic
from stoker.models.language_model import close

MOST = 64  # graphs at a time: each keeps the logits of its rows
CAST = 0.1  # most of the weights that every replay may cast to the type of products

Record = Callable[[Callable[[], Tensor]], tuple[Callable[[], None], Tensor]]
"""Records work without running it; returns a call that runs it, and the tensor that it writes."""


@dataclass(frozen=True)
class _Graph:
    """A recorded step: its inputs, the call that runs it, and its logits, shape (B, V)."""

    ids_B1: Tensor
    rows: PagedRows
    replay: Callable[[], None]
    logits_BV: Tensor

    def run(self, ids_B1: Tensor, rows: PagedRows) -> Tensor:
        """Returns the logits of a step; the next one overwrites them."""
        self.ids_B1.copy_(ids_B1)
        self.rows.table_BL.copy_(rows.table_BL)
        self.rows.lengths_B.copy_(rows.lengths_B)
        self.replay()
        return self.logits_BV


class DecodeGraphs:
    """Runs the decoding steps of an engine, by graphs where they can be recorded."""

    def __init__(self, decoder: Decoder, record: Record | None) -> None:
        """
        Args:
            record: see `recorder_of`; None to record nothing.
        """
        self._decoder, self._record = decoder, record
        self._graphs: dict[tuple[object, ...], _Graph] = {}
        self._pages = 0  # of the pool whose addresses they hold

    def forget(self) -> None:
        """Drops the graphs, because weights may have other addresses."""
        self._graphs.clear()

    def logits(self, ids_B1: Tensor, cache: RowCache | PagedCache, adapter: str | None) -> Tensor:
        """Runs a step and returns the logits of each row, shape (B, V), until the next step."""
        if self._record is not None and isinstance(cache, PagedCache):
            cache.begin(1, ids_B1.device)
            assert cache.rows is not None
            filled_B1 = filled(ids_B1, len(cache.rows.lengths_B))
            graph = self._graph(filled_B1, cache.rows, cache, adapter)
            if graph is not None:
                cache.advance(1)
                return graph.run(filled_B1, cache.rows)[: len(ids_B1)]
        return self._decoder.run(ids_B1, cache, lambda hidden_B1D: self._decoder.logits(hidden_B1D[:, -1]))

    def _graph(self, ids_B1: Tensor, rows: PagedRows, cache: PagedCache, adapter: str | None) -> _Graph | None:
        """Returns the graph of a step, recorded now if it is the first of its kind; None if that fails."""
        if rows.pages != self._pages:  # the pool was allocated again
            self._graphs.clear()
            self._pages = rows.pages
        key = (adapter, *rows.table_BL.shape)
        if key not in self._graphs:
            if len(self._graphs) == MOST:
                del self._graphs[next(iter(self._graphs))]
            try:
                self._graphs[key] = self._recorded(ids_B1, rows, cache)
            except RuntimeError as error:  # the step waits for the device, or memory is short
                print(f"answers are generated without CUDA graphs ({reason_of(error)})", file=sys.stderr, flush=True)
                self._record = None
                self._graphs.clear()
        return self._graphs.get(key)

    def _recorded(self, ids_B1: Tensor, rows: PagedRows, cache: PagedCache) -> _Graph:
        """Records a step.

        Raises:
            RuntimeError: the step cannot be recorded, or its replay gives other logits.
        """
        assert self._record is not None
        own_B1 = ids_B1.clone()
        table_BL, lengths_B = rows.table_BL.clone(), rows.lengths_B.clone()

        def work() -> Tensor:
            # What is derived from the inputs is part of the work.
            return self._decoder.step_logits(own_B1, cache, PagedRows(table_BL, lengths_B, rows.pages))

        with _without_cast_cache():
            expected_BV = work()
            replay, logits_BV = self._record(work)
        graph = _Graph(own_B1, PagedRows(table_BL, lengths_B, rows.pages), replay, logits_BV)
        if not close(graph.run(ids_B1, rows), expected_BV):
            raise RuntimeError("other logits")
        return graph


def recorder_of(decoder: Decoder) -> Record | None:
    """Returns the recorder for a model's steps; None where they are not recorded.

    That is on devices without CUDA, for passes that depend on other processes, for bases of bitsandbytes, some of whose
    kernels wait for the device, and for weights in float32 under autocast, which every replay would cast again, unless
    the decoder has copies of them.
    """
    has_bitsandbytes = any(type(module).__module__.startswith("bitsandbytes") for module in decoder.model.modules())
    if decoder.device.type != "cuda" or not decoder.is_independent or has_bitsandbytes or _cast_share(decoder) > CAST:
        return None
    recorded = WeakSet[torch.cuda.CUDAGraph]()

    def record(work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        pool = next((other.pool() for other in recorded), None)  # of a graph that still lives
        graph = torch.cuda.CUDAGraph()
        # The outer context sets the stream again if the recording fails. Other threads may use the device meanwhile, as
        # the one that lays out the next batch does.
        with (
            torch.cuda.stream(torch.cuda.current_stream()),
            torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"),
        ):
            logits_BV = work()
        recorded.add(graph)
        return graph.replay, logits_BV

    return record


def _cast_share(decoder: Decoder) -> float:
    """Returns the share of the weights that autocast casts in each step."""
    copied = {layer.weight for layer in decoder.cast.layers} if decoder.cast is not None else set()
    if decoder.device.autocast_dtype is None:
        return 0.0
    modules = [module for name, module in decoder.model.named_modules() if not is_of_critic(name)]
    read, multiplied = (
        {p for module in each for p in module.parameters(recurse=False) if p.dim() > 1}
        for each in (modules, [module for module in modules if not isinstance(module, nn.Embedding)])
    )
    cast = sum(p.numel() for p in multiplied - copied if p.dtype == torch.float32)
    return cast / max(1, sum(p.numel() for p in read))


@contextmanager
def _without_cast_cache() -> Iterator[None]:
    """Makes autocast cast every time: its copies are freed when it ends, and a graph would read them."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
