"""Layers that carry a state along a row compute the documents of a packed row apart, as the rows of a batch.

Shapes: T tokens of the packed row, D width, N documents of a batch, L tokens of its longest.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from stoker.hardware.process_device import on_device
from stoker.models.attention.collate import groups_by_length
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


def apart(layer: nn.Module) -> None:
    """Replaces a layer's forward pass, in place; without a packed row, and in generation, it is the layer's own."""
    layer.forward = partial(_forward, layer.forward)


def _forward(forward: Any, hidden_states: Tensor, *arguments: Any, **options: Any) -> Tensor:
    row = active_row()
    if not isinstance(row, PackedRow):
        out: Tensor = forward(hidden_states, *arguments, **options)
        return out
    return _by_document(row, forward, hidden_states)


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
