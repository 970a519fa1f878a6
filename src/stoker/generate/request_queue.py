"""Queue of requests: selects the prompts to prefill next, and reuses known keys and values."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from stoker.generate.decoder import Decoder
from stoker.generate.paged_cache import PagedCache
from stoker.generate.prefill import PASS, PendingPrompt, Prefill
from stoker.generate.prefix_cache import Prefixes, common_length
from stoker.generate.request import Generation
from stoker.generate.row_cache import Kept, RowCache

PADDING = 0.4  # largest share of padding among them
WORTH_SHARING = 32  # tokens that a common prefix must be computed first


Fits = Callable[[Sequence[Generation]], bool]
"""Returns whether memory suffices for generations beside those that have begun."""


@dataclass(eq=False)  # so that finding one in the queue runs no Python code, beside which another thread could add one
class _QueuedGeneration:
    """A queued generation.

    Attributes:
        ids: see `PendingPrompt`.
        looked_for_others: whether a common prefix with others was looked for.
    """

    generation: Generation
    ids: np.ndarray
    looked_for_others: bool = False


class RequestQueue:
    """The queue of requests, and the keys and values of earlier prompts.

    Args:
        budget: bytes for keys and values of earlier prompts.
    """

    def __init__(self, decoder: Decoder, budget: int) -> None:
        self._decoder, self._prefixes = decoder, Prefixes(budget, states=len(decoder.state_layers))
        self._queue: deque[_QueuedGeneration] = deque()
        self._virtual: dict[str | None, Kept | None] = {}

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, generation: Generation, *, first: bool = False) -> None:
        """Queues a generation; with ``first`` at the head. May be called from any thread."""
        waiting = _QueuedGeneration(generation, self._ids(generation))
        if first:
            self._queue.appendleft(waiting)
        else:
            self._queue.append(waiting)

    def take_cancelled(self) -> list[Generation]:
        """Removes cancelled generations."""
        cancelled = [waiting for waiting in list(self._queue) if waiting.generation.cancelled]
        for waiting in cancelled:
            self._queue.remove(waiting)
        return [waiting.generation for waiting in cancelled]

    def take_all(self) -> list[Generation]:
        """Removes all generations."""
        return [self._queue.popleft().generation for _ in range(len(self._queue))]

    def remember(self, adapter: str | None, ids: np.ndarray, kept: Kept) -> None:
        """Caches the keys and values of a sequence."""
        self._prefixes.remember(adapter, ids, kept)

    def remember_row(self, generation: Generation, cache: RowCache | PagedCache, row: int) -> None:
        """Caches those of a generation, if requested. Its last token was not passed through the model."""
        if generation.request.remember and not generation.cancelled:
            kept = cache.kept(row)
            tokens = kept[0][0].shape[1]
            self._prefixes.remember(generation.request.adapter, self._ids(generation)[:tokens], kept)

    def forget(self) -> None:
        """Clears the cache, because the weights have changed."""
        self._prefixes.forget()
        self._virtual.clear()

    def next(self, running: int, rows: int, fits: Fits, token_bytes: int) -> Prefill | None:
        """Returns the prompts at the head of the queue that run next; None if there is no room for any.

        Args:
            running: requests that have begun.
            rows: most of these requests.
            token_bytes: bytes of a token's keys and values; 0 while unknown.
        """
        if not self._queue:
            return None
        adapter = self._queue[0].generation.request.adapter
        beginning = self._common_beginning(adapter, token_bytes)
        prompts = [beginning] if beginning is not None else self._together(adapter, running, rows, fits)
        return Prefill(adapter, prompts, self._decoder.new_rows()) if prompts else None

    def _together(self, adapter: str | None, running: int, rows: int, fits: Fits) -> list[PendingPrompt]:
        prompts: dict[bytes, PendingPrompt] = {}
        taken: list[Generation] = []
        for waiting in list(self._queue):
            generation, key = waiting.generation, waiting.ids.tobytes()
            taken.append(generation)
            if running + len(taken) > rows or generation.request.adapter != adapter or not fits(taken):
                break
            if generation.unscored:
                key += bytes(1 + len(prompts))  # not shared with others
            if key in prompts:
                prompts[key].generations.append(generation)
            else:
                prompt = self._prompt(waiting)
                widths = [prompt.new, *(p.new for p in prompts.values())]
                padded = len(widths) * max(widths)
                if prompts and self._passes_states([prompt, *prompts.values()]):
                    break
                if prompts and (padded > PASS or sum(widths) < (1 - PADDING) * padded):
                    break
                prompts[key] = prompt
            self._queue.remove(waiting)
        return list(prompts.values())

    def _passes_states(self, prompts: Sequence[PendingPrompt]) -> bool:
        """Returns whether tokens before those that a prompt computes would be added to the states that it has."""
        most = max(prompt.new for prompt in prompts)
        return bool(self._decoder.state_layers) and any(p.known is not None and p.new < most for p in prompts)

    def _prompt(self, waiting: _QueuedGeneration) -> PendingPrompt:
        request = waiting.generation.request
        known, tokens = self._known(request.adapter, waiting.ids[: self._reusable(waiting)])
        if not waiting.generation.tokens:  # else it was preempted
            waiting.generation.shared = max(0, tokens - int((waiting.ids < 0).sum()))
        virtual = len(self._decoder.virtual_ids(request.adapter))
        return PendingPrompt(waiting.ids, known, tokens, virtual, [waiting.generation])

    def _reusable(self, waiting: _QueuedGeneration) -> int:
        """Returns how many tokens may come from the cache: not the last one, nor the scored ones."""
        request, most = waiting.generation.request, len(waiting.ids) - 1
        if not waiting.generation.unscored:
            return most
        return min(most, len(self._decoder.virtual_ids(request.adapter)) + request.score_from - 1)

    def _known(self, adapter: str | None, ids: np.ndarray) -> tuple[Kept | None, int]:
        """Returns the keys and values of the longest known prefix of these tokens, and its length."""
        if adapter not in self._virtual:
            self._virtual[adapter] = self._decoder.virtual_keys_values(adapter)
        known = self._virtual[adapter]
        tokens = known[0][0].shape[1] if known else 0
        found = self._prefixes.longest(adapter, ids)
        return found if found is not None and found[1] > tokens else (known, tokens)

    def _common_beginning(self, adapter: str | None, token_bytes: int) -> PendingPrompt | None:
        """Returns the common prefix of the first prompt and others in the queue, where computing it once pays."""
        first, *others = self._queue
        if first.looked_for_others or not self._prefixes.budget:
            return None
        first.looked_for_others = True
        ids = first.ids[: self._reusable(first)]
        known, tokens = self._known(adapter, ids)
        shared = [
            common_length(ids, other.ids[: self._reusable(other)])
            for other in others
            if other.generation.request.adapter == adapter
            and (first.generation.unscored or not np.array_equal(first.ids, other.ids))  # equal ones are one prompt
        ]
        length = min((n for n in shared if n - tokens >= WORTH_SHARING), default=0)
        if length - tokens < WORTH_SHARING or length * token_bytes > self._prefixes.budget // 2:
            return None
        return PendingPrompt(first.ids[:length], known, tokens, len(self._decoder.virtual_ids(adapter)), [])

    def _ids(self, generation: Generation) -> np.ndarray:
        """Returns the ids of a generation; see `PendingPrompt.ids`."""
        virtual = self._decoder.virtual_ids(generation.request.adapter)
        ids = generation.so_far
        if not generation.request.max_tokens:
            ids = ids[:-1] or ids  # no token follows the last one
        return np.asarray([*virtual, *ids], dtype=np.int64)
