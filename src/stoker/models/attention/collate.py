"""Collates rows to the tensors of a forward pass: packed end to end with common prefixes once, or padded.

Instruction rows often share a prefix: the same system message, the same tools. A packed row contains such a prefix
once, and every document that begins with it attends to it. In a causal model a token's hidden state does not depend on
later tokens, so losses and gradients are those of the separate documents, for less computation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from stoker.models.attention.packed_row import AcrossRow

Row = tuple[np.ndarray, np.ndarray]
"""(token ids, trained mask) of a document, both of shape (length,)."""

SHORTEST_PREFIX = 8  # tokens; sharing fewer costs more in small attentions than it saves
PADDING = 1.25  # padded rows are grouped by length until they hold at most this much more than their tokens


@dataclass(frozen=True)
class Segment:
    """A stretch of a packed row that attends to itself, and before that to a prefix elsewhere in the row."""

    start: int
    length: int
    prefix_start: int = 0
    prefix_length: int = 0


@dataclass(frozen=True)
class Inputs:
    """The inputs of a forward pass, and the positions that predict a target.

    Attributes:
        ids: token ids, shape (B, T).
        positions: position ids, shape (B, T); None if the model makes them itself.
        mask: 1 for tokens, 0 for padding, shape (B, T); None without padding.
        segments: of a packed row, in order; None for padded rows.
        predict: flat indices of the positions whose next token is trained, shape (N,). The last position of a shared
            prefix occurs once for each document that continues it.
        targets: those next tokens, shape (N,).
        tokens: of the documents, shared ones counted for each, without padding.
        rows: number of documents.
        documents: the document of each target, shape (N,).
        members: the segments of each document of a packed row.
        own: the tokens of a packed row on this process; None for all.
        across: the processes that share the row; None if this one has all of it. ``segments`` are always those of
            the whole row.
        given: a task's values of the documents, shape (rows,), or of the targets, shape (N,), by name.
        balance: weight of each document in the routers' auxiliary loss; None for its number of targets.
        span: ``predict`` as a slice where it is consecutive and nearly all positions, as in pre-training; else None.
    """

    ids: Tensor
    positions: Tensor | None
    mask: Tensor | None
    segments: tuple[Segment, ...] | None
    predict: Tensor
    targets: Tensor
    tokens: int
    rows: int
    documents: Tensor
    members: tuple[tuple[int, ...], ...] = ()
    own: Tensor | None = None
    across: AcrossRow | None = None
    given: Mapping[str, Tensor] = field(default_factory=dict)
    balance: float | None = None
    span: slice | None = None

    def predicting(self, x_BTD: Tensor) -> Tensor:
        """Returns the states at the predicting positions, shape (N, D): a view where these are consecutive.

        The backward pass of an index sorts it.
        """
        x_TD = x_BTD.flatten(0, 1)
        if self.span is None:
            return x_TD[self.predict]
        return x_TD if self.span == slice(0, len(x_TD)) else x_TD[self.span]

    def sum_by_document(self, values_N: Tensor) -> Tensor:
        """Sums a value of each target over each document, shape (rows,), the same on all processes of the row."""
        own_R = values_N.new_zeros(self.rows).index_add(0, self.documents, values_N)
        return own_R if self.across is None else self.across.total(own_R)

    def counted_once(self, loss: Tensor) -> Tensor:
        """Returns a loss that all processes of the row computed: its value on one of them, its gradient on each."""
        return loss if self.across is None or self.across.is_first else loss - loss.detach()


def pad_with_document(inputs: Inputs, length: int) -> Inputs:
    """Extends a packed row by a document without targets, whose positions stay within the row's range."""
    more = length - inputs.ids.shape[1]
    assert more >= 0 and inputs.segments is not None and inputs.positions is not None
    if not more:
        return inputs
    # A model with learned positions has none beyond its context, and a filler may be longer than any document.
    positions = torch.arange(more, device=inputs.ids.device) % (inputs.positions.max() + 1)
    return replace(
        inputs,
        ids=torch.nn.functional.pad(inputs.ids, (0, more)),
        positions=torch.cat((inputs.positions, positions[None]), dim=1),
        segments=(*inputs.segments, Segment(inputs.ids.shape[1], more)),
    )


def empty_row(device: torch.device) -> Inputs:
    """Returns a row of one token without a target: its loss and its gradients are zero."""
    none = torch.zeros(0, dtype=torch.int64, device=device)
    one = torch.zeros(1, 1, dtype=torch.int64, device=device)
    return Inputs(
        ids=one,
        positions=one,
        mask=None,
        segments=(Segment(0, 1),),
        predict=none,
        targets=none,
        tokens=0,
        rows=0,
        documents=none,
    )


def cut_after_last_target(row: Row) -> Row:
    """Returns the row up to its last trained token."""
    ids, trained = row
    end = int(np.flatnonzero(trained)[-1]) + 1 if trained.any() else len(ids)
    return ids[:end], trained[:end]


def pack(rows: Sequence[Row], device: torch.device, *, share: bool) -> Inputs:
    """Packs all rows into one, without padding.

    Args:
        share: whether the row contains common prefixes once; not where dropout must differ between documents.
    """
    trimmed = [cut_after_last_target(row) for row in rows]
    groups = common_prefixes([ids for ids, _ in trimmed]) if share else [([i], 0) for i in range(len(rows))]
    pieces: list[np.ndarray] = []
    positions: list[np.ndarray] = []
    segments: list[Segment] = []
    predict: list[np.ndarray] = []
    targets: list[np.ndarray] = []
    documents: list[np.ndarray] = []
    members_of: dict[int, tuple[int, ...]] = {}
    at = 0
    for members, shared in groups:
        prefix_start, prefix = at, (len(segments),) if shared else ()
        if shared:
            pieces.append(trimmed[members[0]][0][:shared])
            positions.append(np.arange(shared))
            segments.append(Segment(at, shared))
            at += shared
        for member in members:
            ids, trained = trimmed[member]
            # The last token is only a target: as an input it would have no target.
            own = len(ids) - 1 - shared
            where = np.flatnonzero(trained[1:])  # positions that predict a trained token
            predict.append(np.where(where < shared, prefix_start + where, at + where - shared))
            targets.append(ids[where + 1])
            documents.append(np.full(len(where), member))
            members_of[member] = (*prefix, len(segments)) if own > 0 else prefix
            if own > 0:
                pieces.append(ids[shared:-1])
                positions.append(np.arange(shared, shared + own))
                segments.append(Segment(at, own, prefix_start, shared))
                at += own
    predicting = np.concatenate(predict)
    return Inputs(
        ids=_tensor(np.concatenate(pieces), device)[None],
        positions=_tensor(np.concatenate(positions), device)[None],
        mask=None,
        segments=tuple(segments),
        predict=_tensor(predicting, device),
        targets=_tensor(np.concatenate(targets), device),
        tokens=sum(len(ids) for ids, _ in rows),
        rows=len(rows),
        documents=_tensor(np.concatenate(documents), device),
        members=tuple(members_of[member] for member in range(len(rows))),
        span=_span(predicting, at),
    )


def common_prefixes(documents: Sequence[np.ndarray]) -> list[tuple[list[int], int]]:
    """Documents grouped by their prefix: (members in their order, tokens of the common prefix).

    The last token of a document is never an input, so a prefix is shorter than every document that has it.
    """
    by_start: dict[bytes, list[int]] = {}
    for i, ids in enumerate(documents):
        # The key of a document that is too short to share is its number, so it forms a group alone.
        key = ids[:SHORTEST_PREFIX].tobytes() if len(ids) > SHORTEST_PREFIX else i.to_bytes(9, "big")
        by_start.setdefault(key, []).append(i)
    groups = []
    for members in by_start.values():
        shared = 0
        if len(members) > 1:
            shared = min(len(documents[i]) for i in members) - 1
            first = documents[members[0]][:shared]
            for i in members[1:]:
                differs = np.flatnonzero(documents[i][: len(first)] != first)
                first = first[: differs[0]] if differs.size else first
            shared = len(first)
        groups.append((members, shared))
    return groups


def pad(rows: Sequence[Row], device: torch.device) -> Inputs:
    """Returns the rows as a batch, padded on the right. The mask marks padding, never a token's id."""
    trimmed = [cut_after_last_target(row) for row in rows]
    # The last token is only a target, as in `pack`, and a model with learned positions may have none for it.
    longest = max(1, *(len(ids) - 1 for ids, _ in trimmed))
    ids = np.zeros((len(rows), longest + 1), dtype=np.int64)
    mask = np.zeros((len(rows), longest), dtype=np.int64)
    trained = np.zeros((len(rows), longest), dtype=bool)
    for i, (row_ids, row_trained) in enumerate(trimmed):
        ids[i, : len(row_ids)], mask[i, : max(1, len(row_ids) - 1)] = row_ids, 1
        trained[i, : len(row_ids) - 1] = row_trained[1:]
    predict = np.flatnonzero(trained)
    return Inputs(
        ids=_tensor(ids[:, :-1], device),
        positions=None,
        mask=_tensor(mask, device) if (mask == 0).any() else None,
        segments=None,
        predict=_tensor(predict, device),
        targets=_tensor(ids[:, 1:].reshape(-1)[predict], device),
        tokens=sum(len(row_ids) for row_ids, _ in rows),
        rows=len(rows),
        documents=_tensor(predict // longest, device),
        span=_span(predict, mask.size),
    )


def groups_by_length(lengths: Sequence[int], unit_size: int = 1) -> list[list[int]]:
    """Groups rows of similar length, so that a padded batch has little padding; returns the rows of each group.

    Args:
        unit_size: how many consecutive rows stay in one group, in their order.
    """
    groups: list[list[int]] = []
    units = [range(i, min(i + unit_size, len(lengths))) for i in range(0, len(lengths), unit_size)]
    for unit in sorted(units, key=lambda unit: max(lengths[i] for i in unit)):
        group = [*groups[-1], *unit] if groups else []
        longest = max(lengths[i] for i in unit)
        if group and longest * len(group) <= PADDING * sum(lengths[i] for i in group):
            groups[-1] = group
        else:
            groups.append([*unit])
    return groups


def _span(positions: np.ndarray, length: int) -> slice | None:
    """Returns the positions as a slice if they are consecutive and all of a row, or all but one.

    A view keeps the whole row in memory, so that a small part is copied instead.
    """
    if len(positions) < max(1, length - 1) or (np.diff(positions) != 1).any():
        return None
    return slice(int(positions[0]), int(positions[-1]) + 1)


def _tensor(values: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(values.astype(np.int64)).to(device)
