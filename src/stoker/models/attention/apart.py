"""Layers that carry a state along a row compute the documents of a packed row apart: by kernels that know documents, or
as the rows of a batch.

Shapes: T tokens of the packed row, D width, N documents (of a batch), L tokens of its longest, S tokens of all
documents with their prefixes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from stoker.hardware.process_device import on_device
from stoker.models.attention.collate import groups_by_length
from stoker.models.attention.linear_kernels import takes_kernels
from stoker.models.attention.packed_row import PackedRow, active_row


@dataclass(frozen=True)
class _Batches:
    """The documents of a packed row in batches of similar length, each behind the prefix that it shares.

    Attributes:
        tokens: positions in the row of each batch, shape (N, L); those behind the end of a document are 0.
        own: where the batches' outputs, one after another, have each token of the row, shape (T,).
    """

    tokens: list[Tensor]
    own: Tensor


@dataclass(frozen=True)
class _Documents:
    """The documents of a packed row, one after another, each behind the prefix that it shares.

    Attributes:
        bounds, bounds_cpu: where each document starts, and where the last one ends, shape (N + 1,).
        tokens: positions in the row of their tokens, shape (S,); None if no document shares a prefix.
        own: where they have each token of the row, shape (T,); None likewise.
    """

    bounds: Tensor
    bounds_cpu: Tensor
    tokens: Tensor | None = None
    own: Tensor | None = None


def apart(layer: nn.Module) -> None:
    """Replaces a layer's forward pass, in place; without a packed row, and in generation, it is the layer's own."""
    layer.forward = partial(_forward, layer.forward)


def _forward(forward: Any, hidden_states: Tensor, *arguments: Any, **options: Any) -> Tensor:
    row = active_row()
    if not isinstance(row, PackedRow):
        out: Tensor = forward(hidden_states, *arguments, **options)
        return out
    if takes_kernels(hidden_states):
        return _at_once(row, forward, hidden_states)
    return _by_document(row, forward, hidden_states)


@torch.compiler.disable  # the documents differ from batch to batch, and the kernels are not compiled
def _at_once(row: PackedRow, forward: Any, x_1TD: Tensor) -> Tensor:
    assert row.across is None
    documents = _documents(row, x_1TD.device)
    call = partial(forward, cu_seq_lens_q=documents.bounds, cu_seqlens_cpu=documents.bounds_cpu)
    if documents.tokens is None:
        whole: Tensor = call(x_1TD)
        return whole
    out: Tensor = call(x_1TD[:, documents.tokens])
    return out[:, documents.own]


def _documents(row: PackedRow, device: torch.device) -> _Documents:
    if ("documents",) not in row.masks:
        lengths = torch.tensor([0, *(s.prefix_length + s.length for s in row.segments)])
        bounds_cpu = lengths.cumsum(0)
        bounds = on_device(bounds_cpu.clone(), device)
        found = _Documents(bounds, bounds_cpu)
        if any(s.prefix_length for s in row.segments):
            tokens, own = [], []
            for s, start in zip(row.segments, bounds_cpu.tolist(), strict=False):
                tokens.append(torch.arange(s.prefix_start, s.prefix_start + s.prefix_length))
                tokens.append(torch.arange(s.start, s.start + s.length))
                own.append(torch.arange(s.length) + start + s.prefix_length)
            found = replace(found, tokens=on_device(torch.cat(tokens), device), own=on_device(torch.cat(own), device))
        row.masks["documents",] = found
    kept: _Documents = row.masks["documents",]
    return kept


@torch.compiler.disable  # the documents differ from batch to batch
def _by_document(row: PackedRow, forward: Any, x_1TD: Tensor) -> Tensor:
    assert row.across is None
    batches = _batches(row, x_1TD.device)
    outs = [forward(x_1TD[0][tokens_NL]).flatten(0, 1) for tokens_NL in batches.tokens]
    return torch.cat(outs)[batches.own][None]


def _batches(row: PackedRow, device: torch.device) -> _Batches:
    if ("apart",) not in row.masks:
        lengths = [s.prefix_length + s.length for s in row.segments]
        own = torch.empty(sum(s.length for s in row.segments), dtype=torch.int64)
        tokens, before = [], 0
        for group in groups_by_length(lengths):
            longest = max(lengths[i] for i in group)
            tokens_NL = torch.zeros(len(group), longest, dtype=torch.int64)
            for number, i in enumerate(group):
                s = row.segments[i]
                tokens_NL[number, : s.prefix_length] = torch.arange(s.prefix_start, s.prefix_start + s.prefix_length)
                tokens_NL[number, s.prefix_length : lengths[i]] = torch.arange(s.start, s.start + s.length)
                first = before + number * longest + s.prefix_length
                own[s.start : s.start + s.length] = torch.arange(first, first + s.length)
            before += tokens_NL.numel()
            tokens.append(on_device(tokens_NL, device))
        row.masks["apart",] = _Batches(tokens, on_device(own, device))
    found: _Batches = row.masks["apart",]
    return found
