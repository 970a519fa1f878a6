"""Continuous batching: sequences join and leave between steps; a step adds a token to each.

New prompts are prefilled in a separate cache, in pieces, so that running answers wait for one piece at most. Then their
keys and values are copied into the cache of the others. Requests with different adapters form different batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

import psutil
import torch
from torch import Tensor

from stoker.errors import Problem, UserError
from stoker.generate.cache_choice import CacheChoice
from stoker.generate.decode_graphs import DecodeGraphs, recorder_of
from stoker.generate.decoder import Decoder
from stoker.generate.paged_cache import PagedCache
from stoker.generate.prefill import PASS, Prefill
from stoker.generate.request import Ending, Generation, Listener, Request, Token
from stoker.generate.request_queue import RequestQueue
from stoker.generate.row_cache import RowCache
from stoker.generate.sampling import next_tokens
from stoker.generate.step_threads import StepThreads

PIECE = 512  # tokens of prompts per pass, including padding, while answers are running
AHEAD = 256  # tokens of an answer for which memory is reserved at its start
SHARE_OF_MEMORY = 0.25  # share of free memory for keys and values, on the CPU; most of it on a GPU
REMEMBERED = 0.25  # share of this memory for keys and values of earlier prompts


@dataclass
class _Batch:
    """Running answers with one adapter, by row of the cache."""

    adapter: str | None
    cache: RowCache | PagedCache
    generations: list[Generation] = field(default_factory=list)


class GenerationEngine:
    """Generates answers with a model in memory. `submit` and `Generation.cancel` may be called from any thread."""

    def __init__(
        self,
        decoder: Decoder,
        *,
        rows: int | None = None,
        memory: int | None = None,
        tries_threads: bool = False,
        paged: bool | None = None,
        graphs: bool = True,
    ) -> None:
        """
        Args:
            rows: most sequences in a step; by default 64 on the CPU and 256 on a GPU.
            memory: bytes for keys and values; by default a share of what is free.
            tries_threads: whether steps on the CPU use all threads or one, whichever is faster at the time; results may
                then differ in their last bits. By default they use all.
            paged: see `CacheChoice`.
            graphs: whether steps are recorded as CUDA graphs where they can be; see `recorder_of`.
        """
        self.decoder = decoder
        on_gpu = decoder.device.type == "cuda"
        self._rows = rows or (256 if on_gpu else 64)
        self._memory = memory or free_memory(decoder.device.torch)
        self._threads = None if on_gpu or not tries_threads else StepThreads()
        self._caches = CacheChoice(decoder, self._memory, paged=paged)
        self._graphs = DecodeGraphs(decoder, recorder_of(decoder) if graphs else None)
        self._waiting = RequestQueue(decoder, int(self._memory * REMEMBERED))
        self._prefill: Prefill | None = None
        self._batches: dict[str | None, _Batch] = {}
        self._token_bytes = self._state_bytes = 0  # of a token, and of a row
        self._failures = 0

    @property
    def context(self) -> int | None:
        """Most tokens of a prompt with its answer; None without a limit."""
        return self.decoder.context

    @property
    def waiting(self) -> int:
        """Number of requests in the queue."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Number of requests that have begun."""
        return (len(self._prefill.rows) if self._prefill else 0) + sum(
            len(batch.generations) for batch in self._batches.values()
        )

    @property
    def busy(self) -> bool:
        """Whether `step` has any work."""
        return bool(self._waiting or self._prefill or self._batches)

    def submit(self, request: Request, listener: Listener | None = None) -> Generation:
        """Queues a request.

        Raises:
            UserError: the prompt is empty or too long for the model, or the adapter does not exist.
        """
        self.decoder.check_adapter(request.adapter)
        if not request.prompt:
            raise UserError("the prompt is empty: the model needs at least one token")
        if self.context is not None:
            room = self.context - len(request.prompt)
            # The last token of a prompt that is only scored needs no pass.
            if room < (1 if request.max_tokens else -1):
                raise UserError(prompt_too_long(len(request.prompt), self.context))
            if request.max_tokens > max(0, room):
                request = replace(request, max_tokens=room)
        generation = Generation(request, listener)
        self._waiting.add(generation)
        return generation

    def run(self, requests: Sequence[Request], listeners: Sequence[Listener] | None = None) -> list[Generation]:
        """Answers requests in one batch."""
        heard_by: Sequence[Listener | None] = listeners or [None for _ in requests]
        generations = [self.submit(*asked) for asked in zip(requests, heard_by, strict=True)]
        try:
            with self.decoder.at_work():
                while any(generation.ended is None for generation in generations):
                    self.step()
                self.decoder.wait_for_others()
        except BaseException as error:
            self.fail(error)
            raise
        return generations

    def stream(self, request: Request) -> Iterator[Token]:
        """Answers one request token by token; closing the iterator cancels it."""
        generation = self.submit(request)
        given = 0
        try:
            while generation.ended is None or given < len(generation.tokens):
                if given == len(generation.tokens):
                    with self.decoder.at_work():
                        self.step()
                while given < len(generation.tokens):
                    given += 1
                    yield generation.tokens[given - 1]
        finally:
            generation.cancel()

    def forget(self) -> None:
        """Drops the keys and values of earlier prompts, because the weights have changed."""
        self._waiting.forget()
        self._graphs.forget()

    def step(self) -> None:
        """Runs a piece of a prompt, then adds a token to every running answer. Must be called within `Decoder.at_work`.

        Raises:
            Exception: the error of a pass; the generations in it have ended with it.
        """
        failures = self._failures
        try:
            self._step()
        except Exception as error:
            if self._failures == failures:  # not in a pass, so the affected generations are unknown
                self.fail(error)
            raise

    def _step(self) -> None:
        self._leave()
        if self._prefill is None:
            self._prefill = self._waiting.next(self.running, self._rows, self._fits, self._token_bytes)
        if self._prefill is not None:
            self._compute(self._prefill)
        for adapter, batch in list(self._batches.items()):
            if batch.generations:
                self._continue(batch)
            if not batch.generations:
                del self._batches[adapter]

    def fail(self, error: BaseException) -> None:
        """Ends all generations with an error."""
        generations = self._waiting.take_all()
        generations += [generation for _, generation in (self._prefill.rows if self._prefill else ())]
        generations += [g for batch in self._batches.values() for g in batch.generations]
        self._prefill = None
        for batch in list(self._batches.values()):
            self._discard(batch)
        self._end_failed(generations, error)

    def _end_failed(self, generations: Sequence[Generation], error: BaseException) -> None:
        self._failures += 1
        for generation in generations:
            generation.error = error
            _end(generation, "failed")

    def _leave(self) -> None:
        """Removes cancelled generations."""
        for generation in self._waiting.take_cancelled():
            _end(generation, "cancelled")
        for batch in self._batches.values():
            for row in reversed(range(len(batch.generations))):
                if batch.generations[row].cancelled:
                    self._finish(batch, row, "cancelled")

    def _compute(self, prefill: Prefill) -> None:
        """Runs the next piece; after the last one, samples the first tokens and moves the prompts into their batch."""
        try:
            with self.decoder.using(prefill.adapter):
                drawn = prefill.run(self.decoder, PIECE if self._batches else PASS)
        except Exception as error:
            self._prefill = None
            self._end_failed([generation for _, generation in prefill.rows], error)
            raise
        if prefill.left:
            return
        self._prefill, self._token_bytes = None, max(1, prefill.cache.token_bytes)
        self._state_bytes = prefill.cache.state_bytes
        batch = self._batches.setdefault(prefill.adapter, _Batch(prefill.adapter, self._caches.new()))
        for row, prompt in enumerate(prefill.prompts):
            if not prompt.generations:
                self._waiting.remember(prefill.adapter, prompt.ids, prefill.cache.kept(row))
        tokens = iter(drawn)
        for row, generation in prefill.rows:
            ending = _take(generation, next(tokens)) if generation.request.max_tokens else "length"
            if ending is None:
                batch.cache.add(prefill.cache.kept(row))
                batch.generations.append(generation)
                generation.notify()
            else:
                self._waiting.remember_row(generation, prefill.cache, row)
                _end(generation, ending)

    def _continue(self, batch: _Batch) -> None:
        """Adds a token to each answer of a batch."""
        self._make_room(batch)
        last = [[generation.tokens[-1].id] for generation in batch.generations]
        ids_B1 = torch.tensor(last, device=self.decoder.device.torch)
        threads = nullcontext() if self._threads is None else self._threads.step(len(last))

        def step(cache: RowCache | PagedCache) -> Tensor:
            return self._graphs.logits(ids_B1, cache, batch.adapter)

        try:
            with self.decoder.using(batch.adapter), threads:
                batch.cache = self._caches.usable(batch.cache, ids_B1, step)
                drawn = next_tokens(step(batch.cache), batch.generations)
        except Exception as error:
            self._discard(batch)  # its cache is half written
            self._end_failed(batch.generations, error)
            raise
        for row in reversed(range(len(drawn))):
            ending = _take(batch.generations[row], drawn[row])
            if ending is None:
                batch.generations[row].notify()
            else:
                self._finish(batch, row, ending)

    def _finish(self, batch: _Batch, row: int, ending: Ending) -> None:
        generation = self._remove(batch, row)
        _end(generation, ending)

    def _remove(self, batch: _Batch, row: int) -> Generation:
        generation, cache = batch.generations[row], batch.cache
        self._waiting.remember_row(generation, cache, row)
        cache.drop(row)
        batch.generations[row] = batch.generations[-1]
        batch.generations.pop()
        return generation

    def _discard(self, batch: _Batch) -> None:
        """Removes a batch and frees its memory."""
        del self._batches[batch.adapter]
        for row in reversed(range(len(batch.generations))):
            batch.cache.drop(row)

    def _fits(self, new: Sequence[Generation]) -> bool:
        """Returns whether memory suffices for new answers beside the running ones; the first one always fits."""
        held = [pair for b in self._batches.values() for pair in zip(b.generations, b.cache.lengths, strict=True)]
        held += [(generation, len(generation.request.prompt) + len(generation.tokens)) for generation in new]
        if len(held) == 1 or not self._token_bytes:
            return True
        return self._suffices([tokens + min(AHEAD, g.request.max_tokens - len(g.tokens)) for g, tokens in held])

    def _suffices(self, lengths: Sequence[int]) -> bool:
        needed = self._caches.tokens_for(lengths) * self._token_bytes + len(lengths) * self._state_bytes
        return needed <= self._memory

    def _make_room(self, batch: _Batch) -> None:
        """Preempts answers, back into the queue, while keys and values exceed the memory."""
        while len(batch.generations) > 1:
            if self._suffices([length + 1 for b in self._batches.values() for length in b.cache.lengths]):
                return
            generation = self._remove(batch, len(batch.generations) - 1)
            self._waiting.add(generation, first=True)


def prompt_too_long(tokens: int, context: int) -> Problem:
    """Returns the error for a prompt that leaves no room for an answer."""
    message = f"the prompt is {tokens:,} tokens, and the model was built for {context:,} with the answer"
    return Problem(message, "shorten the prompt")


def _take(generation: Generation, token: Token) -> Ending | None:
    """Adds a token; returns the reason if it ends the answer."""
    generation.tokens.append(token)
    request = generation.request
    if request.constraint is not None:
        request.constraint.accept(token.id)
    if generation.cancelled:
        return "cancelled"
    if token.id in request.stop_ids:
        return "stop"
    return "length" if len(generation.tokens) >= request.max_tokens else None


def _end(generation: Generation, ending: Ending) -> None:
    generation.ended, generation.seen_V = ending, None
    generation.notify()


def free_memory(device: torch.device) -> int:
    """Returns the bytes of a device's free memory that keys and values may take."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * 0.8)
    return int(psutil.virtual_memory().available * SHARE_OF_MEMORY)
