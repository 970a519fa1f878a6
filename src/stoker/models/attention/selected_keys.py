"""Sparse attention to the keys that an indexer selects for each query (DeepSeek-AI, 2025: DeepSeek-V3.2, section 2.1).

A document with at most as many keys as are selected has plain causal attention. In longer ones the indexer of
transformers selects among the keys of the document, and of the prefix that it shares.

Shapes: T tokens of a packed row, L tokens of a document with its prefix, N selected keys, S keys, D width.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stoker.models.attention.collate import Segment
from stoker.models.attention.packed_row import PackedRow, active_row

SCORES = 2**26  # most elements of the indexer's scores that are computed at once


def select_by_document(attention: Any) -> None:
    """Makes an attention layer with an indexer select keys of the same document in packed rows, in place.

    A layer that has no indexer uses the keys that an earlier one has selected.
    """
    attention.register_forward_pre_hook(_without_mask, with_kwargs=True)
    if attention.indexer is not None:
        attention.indexer.forward = partial(_forward, attention.indexer)


def _without_mask(_: nn.Module, arguments: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Hook: packed rows have no mask, and the code of these layers takes a part of it for the indexer."""
    if options["attention_mask"] is None:
        options = {**options, "attention_mask": options["hidden_states"].new_empty(0, 1, 0, 0)}
    return arguments, options


def _forward(
    indexer: Any,
    hidden_states: Tensor,
    q_resid: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor,
    *arguments: Any,
    **options: Any,
) -> Tensor:
    """Returns the selected keys of each query, shape (B, T, N).

    In a packed row they are numbered within the prefix and the document, and are those of long documents only.
    """
    row = active_row()
    inputs = (hidden_states, q_resid, *position_embeddings)
    if isinstance(row, PackedRow):
        return _by_document(row, indexer, inputs)
    selected: Tensor = type(indexer).forward(
        indexer, hidden_states, q_resid, position_embeddings, attention_mask, *arguments, **options
    )
    return selected


@torch.compiler.disable  # the documents differ from row to row
@torch.no_grad()
def _by_document(row: PackedRow, indexer: Any, inputs: tuple[Tensor, ...]) -> Tensor:
    assert row.across is None
    count: int = indexer.index_topk
    all_keys = inputs[0].new_zeros(1, 1, 1, dtype=torch.int32)
    selected = []
    for s in row.segments:
        if s.prefix_length + s.length <= count:
            selected.append(all_keys.expand(1, s.length, count))
            continue
        own = slice(s.start, s.start + s.length)
        before = slice(s.prefix_start, s.prefix_start + s.prefix_length)
        document = tuple(torch.cat((x[:, before], x[:, own]), dim=1) for x in inputs)
        selected.append(_of_document(indexer, document)[:, s.prefix_length :])
    return selected[0] if len(selected) == 1 else torch.cat(selected, dim=1)


def _of_document(indexer: Any, inputs: tuple[Tensor, ...]) -> Tensor:
    """Returns the selected keys of a document's queries, shape (1, L, N), some queries at a time."""
    length, count = inputs[0].shape[1], indexer.index_topk
    step = max(1, SCORES // (indexer.n_heads * length))
    keys, selected = _Keys(), []
    for first in range(0, length, step):
        hidden, q_resid, cos, sin = (x[:, first : first + step] for x in inputs)
        end = first + hidden.shape[1]
        visible = torch.arange(end, device=hidden.device) <= torch.arange(first, end, device=hidden.device)[:, None]
        found = type(indexer).forward(indexer, hidden, q_resid, (cos, sin), visible[None], None, past_key_values=keys)
        selected.append(F.pad(found, (0, count - found.shape[2])))  # the first key is among them already
    return torch.cat(selected, dim=1)


class _Keys:
    """The indexer's keys of the queries so far, in the place of transformers' cache."""

    def __init__(self) -> None:
        self._keys: list[Tensor] = []

    def update_indexer(self, keys_1LD: Tensor, _: int) -> Tensor:
        self._keys.append(keys_1LD)
        return torch.cat(self._keys, dim=1)


def selects_all(indices_BTN: Tensor, row: PackedRow) -> bool:
    """Returns whether every query of a row sees all keys of its document."""
    return all(s.prefix_length + s.length <= indices_BTN.shape[2] for s in row.segments)


def selection_of(indices_BTN: Tensor, s: Segment) -> Tensor | None:
    """Returns the mask of the keys (prefix, then own) of a segment, shape (length, keys); None if it has all."""
    keys = s.prefix_length + s.length
    if keys <= indices_BTN.shape[2]:
        return None
    return selection_mask(indices_BTN[:, s.start : s.start + s.length], keys)[0]


def selection_mask(indices_BTN: Tensor, keys: int) -> Tensor:
    """Returns the mask that is true at the selected keys, shape (B, T, S)."""
    mask_BTS = torch.zeros(*indices_BTN.shape[:2], keys, dtype=torch.bool, device=indices_BTN.device)
    return mask_BTS.scatter_(2, indices_BTN.long(), True)
