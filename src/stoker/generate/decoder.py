"""Forward passes of a model over the rows of a cache.

Shapes: B rows, T tokens of a pass, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from inspect import signature
from typing import Any, TypeVar
from weakref import WeakSet

import torch
import torch.nn.functional as F
from peft import PeftModel
from torch import Tensor, nn

from stoker.errors import Problem, UserError
from stoker.generate.paged_cache import PagedCache
from stoker.generate.request import BASE
from stoker.generate.row_cache import Kept, RowCache
from stoker.generate.small_matmul import BlockedWeights, plain_linears, small_matmuls
from stoker.hardware.process_device import Device
from stoker.models.attention.packed_row import within
from stoker.models.attention.paged_rows import PagedRows
from stoker.models.cache_argument import cache_argument, indexed_layers, state_layers
from stoker.models.cast_weights import CastWeights
from stoker.models.families import family_of
from stoker.models.language_model import LanguageModel, lay_out_for
from stoker.models.tuning.adapters import unwrap, without_adapter
from stoker.models.tuning.virtual_tokens import Prefix, VirtualPrompt, virtual_of, virtual_tokens_off
from stoker.parallel.float64_mode import arithmetic_of

T = TypeVar("T")
SHARE_OF_CASTS = 0.25  # most of the memory for keys and values that copies of weights may take


def directly(work: Callable[[], T]) -> T:
    """Runs a pass of a model whose weights are all here."""
    return work()


@dataclass(frozen=True)
class Decoder:
    """A model that continues rows.

    Attributes:
        model: the model with its adapters.
        language: the inner model, and its head.
        context: most tokens of a sequence, prompt and answer together; None without a limit.
        within: runs a pass while the model's weights are gathered.
        others: for processes whose passes depend on each other: takes whether this process has a pass to run, and
            returns whether any has. None if passes are independent.
        release: frees the weights that stay gathered after a pass.
        blocked: copies of weights in a faster layout, valid while the decoder is used.
        cast: copies of weights in the type of products.
    """

    model: nn.Module
    language: LanguageModel
    device: Device
    context: int | None = None
    within: Callable[[Callable[[], Any]], Any] = directly
    others: Callable[[bool], bool] | None = None
    release: Callable[[], None] | None = None
    blocked: BlockedWeights | None = None
    cast: CastWeights | None = None

    @property
    def is_independent(self) -> bool:
        """Whether this process computes passes by itself."""
        return self.others is None and self.within is directly

    @property
    def layers(self) -> int:
        """Number of layers with keys and values of their own, or with states."""
        config: Any = self.language.model.config.get_text_config()
        return int(config.num_hidden_layers - (getattr(config, "num_kv_shared_layers", None) or 0))

    @cached_property
    def state_layers(self) -> frozenset[int]:
        """Numbers of the layers that carry a state along a row, which cannot be cut at a token.

        Raises:
            UserError: rows of such states are not implemented for this family.
        """
        config = self.language.model.config
        found, family = state_layers(config), family_of(config)
        if cache_argument(self._body) is None or (found and (family is None or not family.by_document)):
            message = f"Stoker generates no answers with models of family {config.model_type}, which carry a state"
            raise UserError(Problem(message, "export the run, and generate with transformers"))
        return found

    @cached_property
    def indexed_layers(self) -> tuple[int, ...]:
        """Numbers of the layers with an indexer, which keeps keys of its own."""
        return indexed_layers(self.language.model.config)

    def new_rows(self) -> RowCache:
        """Returns an empty cache of rows."""
        return RowCache(self.layers, self.state_layers, self.indexed_layers)

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the adapters in memory."""
        return tuple(self.model.peft_config) if isinstance(self.model, PeftModel) else ()

    @cached_property
    def _linears(self) -> WeakSet[nn.Linear]:
        return WeakSet(plain_linears(self.language.model))  # weak: unloaded adapters are freed

    @cached_property
    def _virtual(self) -> VirtualPrompt | Prefix | None:
        return virtual_of(self.model)

    @property
    def _prefix(self) -> Prefix | None:
        return self._virtual if isinstance(self._virtual, Prefix) else None

    @cached_property
    def _body(self) -> nn.Module:
        """The module that returns the last hidden states, or the logits where the model has no separate head."""
        model = self.language.model
        body = model if self.language.head is None or model.base_model is model else model.base_model
        assert isinstance(body, nn.Module)
        return body

    @cached_property
    def _takes_positions(self) -> bool:
        return "position_ids" in signature(self._body.forward).parameters

    @cached_property
    def _cache_argument(self) -> str:
        found = cache_argument(self._body)
        assert found is not None  # see `state_layers`
        return found

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Context of forward passes: evaluation mode, no gradients, the device's precision."""
        training = self.model.training
        with ExitStack() as stack:
            # Sharded weights are gathered into tensors that training uses later.
            stack.enter_context(torch.no_grad() if self.others is not None else torch.inference_mode())
            # Every step has other lengths, for each of which a compiled block would be recompiled.
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(arithmetic_of(self.device))
            stack.enter_context(self.device.autocast())
            if self.cast is not None:
                stack.enter_context(self.cast.in_use())
            stack.enter_context(small_matmuls(self._linears, self.blocked))
            if training:
                self.model.eval()
            try:
                yield
            finally:
                if training:
                    self.model.train()
                if self.release is not None:
                    self.release()

    def check_adapter(self, adapter: str | None) -> None:
        """Rejects adapters that `using` cannot use.

        Raises:
            UserError: the adapter does not exist.
        """
        if adapter and adapter not in self.adapters:
            raise UserError(f"there is no adapter {adapter!r}; there are: {', '.join(self.adapters) or 'none'}")

    @contextmanager
    def using(self, adapter: str | None) -> Iterator[None]:
        """Activates an adapter within the block; see `check_adapter`."""
        if adapter is None:
            yield
        elif adapter == BASE:
            with without_adapter(self.model):
                yield
        else:
            model = self.model
            assert isinstance(model, PeftModel)
            before = model.active_adapter
            model.set_adapter(adapter)
            try:
                yield
            finally:
                model.set_adapter(before)

    def virtual_ids(self, adapter: str | None) -> list[int]:
        """Returns the ids of the virtual tokens before every row; negative where they are keys and values only."""
        found = self._virtual
        if adapter == BASE or found is None:
            return []
        return list(range(-found.config.num_virtual_tokens, 0)) if isinstance(found, Prefix) else found.ids

    def virtual_keys_values(self, adapter: str | None) -> Kept | None:
        """Returns the keys and values before every row; None without a prefix. Must be called within `at_work`."""
        if self._prefix is None or adapter == BASE:
            return None
        return tuple(
            (keys[0], values[0]) for keys, values in self._prefix.keys_and_values(1, self.language.model.dtype)
        )

    def run(self, ids_BT: Tensor, cache: RowCache | PagedCache, read: Callable[[Tensor], T]) -> T:
        """Runs a pass over the next columns of a cache.

        Args:
            read: maps the last hidden states, shape (B, T, D), to the result. It may call `logits`, as a sharded
                model's weights stay gathered until it returns.
        """
        if self.others is not None:
            self.others(True)
        with virtual_tokens_off(self._prefix):  # the cache has it already
            found = self.within(lambda: read(self._hidden(ids_BT, cache)))
        cache.advance(ids_BT.shape[1])
        return found

    def preview(self, ids_BT: Tensor, cache: RowCache | PagedCache) -> Tensor:
        """Returns the logits of each row's last token, shape (B, V), of a pass that is then run again."""
        with virtual_tokens_off(self._prefix):  # the cache has it already
            return self.within(lambda: self.logits(self._hidden(ids_BT, cache)[:, -1]))

    def step_logits(self, ids_B1: Tensor, cache: PagedCache, rows: PagedRows) -> Tensor:
        """Returns the logits of a step, shape (B, V). It only queues work for the device, and reads nothing from it.

        Args:
            rows: the rows of `PagedCache.begin`, with those that fill the batch.
        """
        with within(rows):
            return self.logits(self._states(ids_B1, cache, None, rows.positions_B[:, None])[:, -1])

    def wait_for_others(self) -> None:
        """Joins the passes of other processes until none of them has any left."""
        while self.others is not None and self.others(False):
            cache = self.new_rows()
            cache.open([1], [None])
            self.preview(torch.zeros(1, 1, dtype=torch.int64, device=self.device.torch), cache)

    def logits(self, hidden_ND: Tensor) -> Tensor:
        """Returns the logits of some positions, shape (N, V)."""
        head = self.language.head
        if head is None:
            return hidden_ND
        logits_NV = head.logits(hidden_ND)
        return logits_NV if head.across is None else head.across.gather(logits_NV)

    def _hidden(self, ids_BT: Tensor, cache: RowCache | PagedCache) -> Tensor:
        """Returns the last hidden states, shape (B, T, D); without a separate head the model's logits, shape
        (B, T, V).
        """
        mask, positions = cache.begin(ids_BT.shape[1], ids_BT.device)
        with cache.at_hand():
            return self._states(filled(ids_BT, len(positions)), cache, mask, positions)[: len(ids_BT)]

    def _states(
        self, ids_BT: Tensor, cache: RowCache | PagedCache, mask: Tensor | None, positions_BT: Tensor
    ) -> Tensor:
        arguments: dict[str, Any] = {"input_ids": ids_BT, self._cache_argument: cache, "use_cache": True}
        if mask is not None:
            arguments["attention_mask"] = mask.to(torch.int64)
        elif not self._takes_positions and isinstance(cache, RowCache):
            arguments["attention_mask"] = torch.ones(
                ids_BT.shape[0], int(positions_BT.max()) + 1, dtype=torch.int64, device=ids_BT.device
            )
        if self._takes_positions:
            arguments["position_ids"] = positions_BT
        found = self._body(**arguments)
        return found.logits if self.language.head is None else found.last_hidden_state


def filled(ids_BT: Tensor, rows: int) -> Tensor:
    """Returns ids with further rows that only fill the batch."""
    return F.pad(ids_BT, (0, 0, 0, rows - len(ids_BT)))


def blocked_weights(model: nn.Module, device: Device) -> BlockedWeights | None:
    """Returns storage for a model's weights in a faster layout, valid until they change; None on a GPU."""
    return BlockedWeights(plain_linears(model)) if device.type == "cpu" else None


def cast_weights(decoder: Decoder, memory: int) -> CastWeights | None:
    """Returns copies of weights for a decoder; None where they would take much of this memory, or are not needed.

    They are for GPUs, and for passes that do not depend on other processes.
    """
    dtype = decoder.device.autocast_dtype
    if decoder.device.type != "cuda" or not decoder.is_independent or dtype is None:
        return None
    found = CastWeights(decoder.model, dtype)
    return found if 0 < found.nbytes <= memory * SHARE_OF_CASTS else None


def decoder_of(model: nn.Module, device: Device, *, context: int | None = None, frozen: bool = False) -> Decoder:
    """Returns the decoder of a model in memory.

    Args:
        frozen: whether its weights never change.
    """
    blocked = blocked_weights(model, device) if frozen else None
    with arithmetic_of(device), device.autocast():
        return Decoder(model, lay_out_for(unwrap(model)), device, context, blocked=blocked)
