"""Lays documents out for a model: packed into one row if the model isolates them, else in padded rows.

Isolation is tested once at the start of a run, on the model itself: a few short documents in one row must have the
same hidden states as each has alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from stoker.hardware.process_device import move_to
from stoker.models import grouped_experts
from stoker.models.attention import packed_attention
from stoker.models.attention.collate import Inputs, Row, Segment, groups_by_length, pack, pad
from stoker.models.attention.even_rows import keep_cudnn_for_even_rows
from stoker.models.attention.long_rope import has_long_rope
from stoker.models.attention.packed_row import row_of
from stoker.models.autocast import autocast_dtype
from stoker.models.dropout import has_dropout
from stoker.models.families import family_of
from stoker.models.head import Head, LogitsHead, head_of
from stoker.models.objective import Loss, Objective, Reading, next_token
from stoker.models.router_balance import RouterBalance, add_auxiliary_gradient, collect_router_logits
from stoker.models.tuning.virtual_tokens import has_prefix, virtual_ids

TOLERANCE = {torch.bfloat16: 3e-2, torch.float16: 5e-3}  # relative, by precision; a leak shows as 5e-2 and more
EIGHT_BIT = 5e-2  # activations are rounded to 8 bits, differently for every batch
LEAK = 0.2  # and at most this share of the effect of a leak
KNOWN_LAYERS = {"full_attention", "sliding_attention"}
PROBE_WINDOW = 4  # tokens, of sliding windows and chunks during the probe
WINDOWS = ("sliding_window", "attention_chunk_size", "floor_scale")  # numbers of tokens after which attention differs


@dataclass
class OwnCritic:
    """A separate critic model of a policy; see `stoker.models.critic`.

    Attributes:
        language: its model, whose head gives scores.
        at_work: whether the current forward pass is the critic's; see `stoker.models.causal_loss.CausalLoss`.
    """

    language: LanguageModel
    at_work: bool = False


@dataclass(frozen=True)
class LanguageModel:
    """A causal language model as training uses it: hidden states, head, and the layout of rows.

    Attributes:
        model: the transformers model, with adapters inside where there are any.
        head: its head; None if it is not a plain linear layer, so that the model computes its own logits.
        packs: whether documents are packed into one row.
        virtual: ids of the virtual tokens before every document.
        balance: the auxiliary loss of its routers; None if it has none.
        critic: a separate critic model; None without.
        dropout: whether the whole model has dropout in training; ``model`` may be one stage of it.
    """

    model: PreTrainedModel
    head: Head | None
    packs: bool
    virtual: tuple[int, ...] = ()
    balance: RouterBalance | None = None
    critic: OwnCritic | None = None
    dropout: bool = False

    def hidden(self, inputs: Inputs, x: Tensor | None = None) -> Tensor:
        """Returns the last hidden states, shape (B, T, D); the logits of a model without a separate body.

        Args:
            x: output of the previous stage, if the model is a later stage of a pipeline.
        """
        if self.model.base_model is self.model:
            return self.model(**_arguments(inputs, x)).logits
        return self.model.base_model(**_arguments(inputs, x)).last_hidden_state

    def loss(self, inputs: Inputs, objective: Objective = next_token, x: Tensor | None = None) -> Loss:
        """Returns the loss of the trained tokens; see `hidden`."""
        with collect_router_logits(self.balance, inputs) as at_work:
            loss = objective(self._predicting(inputs, x), inputs, self.head or LogitsHead())
            return loss._replace(total=add_auxiliary_gradient(loss.total, at_work))

    def read(self, inputs: Inputs, reading: Reading, x: Tensor | None = None) -> Tensor:
        """Runs a forward pass and returns the reading of it; see `hidden`."""
        return reading(self._predicting(inputs, x), inputs, self.head or LogitsHead())

    def _predicting(self, inputs: Inputs, x: Tensor | None) -> Tensor:
        """Returns the head's input at the predicting positions: hidden states, or logits where it has no head."""
        states = self.hidden(inputs, x) if self.head is not None else self.model(**_arguments(inputs, x)).logits
        return inputs.predicting(states)

    def ask(self, rows: Sequence[np.ndarray], device: torch.device) -> list[Inputs]:
        """Inputs that predict the token after the last one of each row. Targets are the rows' numbers."""
        asked = [self._behind((np.append(ids, 0), np.arange(len(ids) + 1) == len(ids))) for ids in rows]
        parts = [pack(asked, device, share=False)] if self.packs else [pad([row], device) for row in asked]
        numbers = torch.arange(len(rows), device=device).split([len(part.targets) for part in parts])
        return [replace(part, targets=own) for part, own in zip(parts, numbers, strict=True)]

    def lay_out(
        self,
        rows: Sequence[Row],
        device: torch.device,
        *,
        unit_size: int = 1,
        share: bool | None = None,
        given: Mapping[str, np.ndarray] | None = None,
    ) -> list[Inputs]:
        """Lays out the forward passes of a micro-batch: one when packed, one or more of similar lengths when padded.

        Args:
            unit_size: number of consecutive documents that stay in one forward pass.
            share: whether a packed row contains common prefixes once; by default unless dropout is active, under which
                equal prefixes differ.
            given: values of the rows by name, shape (rows,), for `Inputs.given`.
        """
        rows = [self._behind(row) for row in rows]
        if self.packs:
            groups = [list(range(len(rows)))]
            share = not (self.model.training and self.dropout) if share is None else share
            share = share and not has_long_rope(self.model.config)
            laid_out = [pack(rows, device, share=share)]
        else:
            groups = groups_by_length([len(ids) for ids, _ in rows], unit_size)
            laid_out = [pad([rows[i] for i in group], device) for group in groups]
        return [
            replace(
                inputs,
                tokens=inputs.tokens - len(self.virtual) * inputs.rows,
                given={name: move_to(torch.as_tensor(v[group]), device) for name, v in (given or {}).items()},
            )
            for inputs, group in zip(laid_out, groups, strict=True)
        ]

    def _behind(self, row: Row) -> Row:
        """Returns a row behind the virtual tokens; its first token is not a target, as in all rows."""
        if not self.virtual:
            return row
        ids, trained = row
        trained = np.concatenate((np.zeros(len(self.virtual) + 1, bool), trained[1:]))
        # Ids of a vocabulary may be of 16 bits, and those behind it need more.
        return np.concatenate((np.asarray(self.virtual, np.int64), ids)), trained


def _arguments(inputs: Inputs, x: Tensor | None) -> dict[str, Tensor | bool]:
    start = {"input_ids": inputs.ids} if x is None else {"inputs_embeds": x}
    arguments: dict[str, Tensor | bool] = {**start, "use_cache": False}
    if inputs.positions is not None:
        arguments["position_ids"] = inputs.positions
    if inputs.mask is not None:
        arguments["attention_mask"] = inputs.mask
    return arguments


@torch.no_grad()
def lay_out_for(
    model: PreTrainedModel, balance: RouterBalance | None = None, *, compiled: bool = False
) -> LanguageModel:
    """Tests packed attention and the separate head; uses each where it agrees with the model.

    To be called under the autocast of the later passes, which selects the kernels.

    Args:
        compiled: whether the blocks will be compiled, and so the head's cross entropy.
    """
    grouped_experts.register()
    keep_cudnn_for_even_rows()
    training = model.training
    model.eval()
    try:
        head = head_of(model)
        if head is not None and not _head_agrees(model, head):
            head = None
        head = replace(head, compiled=compiled) if head is not None else None
        packs = not has_prefix(model) and _isolates(model)  # a prefix is in the cache of a row
        return LanguageModel(model, head, packs, tuple(virtual_ids(model)), balance, dropout=has_dropout(model))
    finally:
        model.train(training)


def _probe_rows(model: PreTrainedModel) -> list[Row]:
    """Returns three rows, two of which share a prefix."""
    generator = np.random.default_rng(0)
    embedding = model.get_input_embeddings().weight
    assert isinstance(embedding, Tensor)
    vocabulary = embedding.shape[0]
    a, b, c = (generator.integers(0, vocabulary, n).astype(np.uint32) for n in (14, 12, 7))
    b[:10] = a[:10]
    return [(ids, np.ones(len(ids), bool)) for ids in (a, b, c)]


def _head_agrees(model: PreTrainedModel, head: Head) -> bool:
    if model.base_model is model:
        return False
    inputs = pad(_probe_rows(model)[:1], model.device)
    own = model(input_ids=inputs.ids, use_cache=False).logits[0]
    hidden = model.base_model(input_ids=inputs.ids, use_cache=False).last_hidden_state[0]
    return close(head.logits(hidden), own)


def _isolates(model: PreTrainedModel) -> bool:
    """Returns whether documents packed into one row have the same hidden states as each has alone."""
    if not _known_masks(model):
        return False
    before = model.config._attn_implementation
    rows = _probe_rows(model)
    whole = LanguageModel(model, None, True)
    try:
        with _short_windows(model):
            alone = torch.cat([_predicting(whole, pad([row], model.device)) for row in rows])
            packed_attention.register()
            model.set_attn_implementation(packed_attention.NAME)
            inputs = pack(rows, model.device, share=True)
            with row_of(inputs):
                together = _predicting(whole, inputs)
            one_document = replace(inputs, segments=(Segment(0, inputs.ids.shape[1]),))
            with row_of(one_document):
                leaking = _predicting(whole, one_document)
        # The difference must also be small compared to that of a leak, which coarse rounding could hide.
        tolerance = EIGHT_BIT if getattr(model, "is_loaded_in_8bit", False) else None
        isolated = close(together, alone, tolerance) and _distance(together, alone) <= LEAK * _distance(leaking, alone)
    except torch.OutOfMemoryError:
        raise
    except (TypeError, ValueError, RuntimeError, NotImplementedError):
        isolated = False  # the code of this family takes no attention function or positions
    if not isolated and before is not None:
        model.set_attn_implementation(before)
    return isolated


def _predicting(whole: LanguageModel, inputs: Inputs) -> Tensor:
    """Returns the hidden states at the predicting positions, shape (N, D)."""
    return inputs.predicting(whole.hidden(inputs))


def _known_masks(model: PreTrainedModel) -> bool:
    """Returns whether every layer is causal, full or with a sliding window, or computes documents apart.

    Others may differ in long rows only.
    """
    config, family = model.config.get_text_config(), family_of(model.config)
    known = KNOWN_LAYERS.union(family.by_document if family is not None else ())
    kinds = set(getattr(config, "layer_types", None) or ())
    return kinds <= known and ("chunked_attention" in known or not getattr(config, "attention_chunk_size", None))


@contextmanager
def _short_windows(model: PreTrainedModel) -> Iterator[None]:
    """Makes sliding windows and chunks shorter than the probe's documents, so that the probe tests them."""
    holders: list[Any] = [model.config, model.config.get_text_config(), *model.modules()]
    sizes = [(holder, name, getattr(holder, name, None)) for holder in holders for name in WINDOWS]
    found = {(id(holder), name): (holder, size) for holder, name, size in sizes if isinstance(size, int)}
    try:
        for (_, name), (holder, _) in found.items():
            setattr(holder, name, PROBE_WINDOW)
        yield
    finally:
        for (_, name), (holder, size) in found.items():
            setattr(holder, name, size)


def _distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).float().square().mean().sqrt())


def close(a: Tensor, b: Tensor, tolerance: float | None = None) -> bool:
    """Returns whether results are equal up to rounding.

    Args:
        tolerance: the largest difference, relative to the largest value; by default that of the precision.
    """
    tolerance = TOLERANCE.get(autocast_dtype(b) or b.dtype, 1e-4) if tolerance is None else tolerance
    return a.shape == b.shape and float((a - b).abs().max()) <= tolerance * (float(b.abs().max()) or 1.0)
