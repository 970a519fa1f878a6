"""Keys and values of sequences that are generated together, aligned at their ends.

Every sequence is a row with its own first column. A pass writes the same columns in every row, as in a left-padded
batch, so the causal and sliding-window masks of transformers apply unchanged.

Shapes: S rows, B rows of a pass, G key-value heads, C columns, T tokens, K head size.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from stoker.generate.state_layer import StateLayer

STEP = 64  # columns are allocated in multiples of this
SPARE = 1.5  # most columns allocated for each that is needed, apart from `STEP`

Kept = tuple[tuple[Tensor, Tensor], ...]
"""Keys and values of consecutive tokens in every layer with attention, each of shape (G, T, K); then the keys of
indexers; then the states after these tokens of the other layers, see `StateLayer`."""


@dataclass
class _Pass:
    """Columns of a pass.

    Attributes:
        rows, columns: allocated size.
        start: first column used by any row.
        first, end: columns of the pass' tokens.
        fresh_BT: True if a token is written, shape (B, T); None if all are.
    """

    rows: int
    columns: int
    start: int = 0
    first: int = 0
    end: int = 0
    fresh_BT: Tensor | None = None


class _Layer(CacheLayerMixin):
    """Keys and values of one layer, both of shape (S, G, C, K)."""

    is_sliding = False

    def __init__(self, at: _Pass) -> None:
        super().__init__()
        self.at = at

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys, self.values = (self._zeros(states) for states in (key_states, value_states))
        self.is_initialized = True

    def _zeros(self, like_BGTK: Tensor) -> Tensor:
        return like_BGTK.new_zeros(self.at.rows, like_BGTK.shape[1], self.at.columns, like_BGTK.shape[3])

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        return self._write(self.keys, key_states), self._write(self.values, value_states)

    def _write(self, held: Tensor | None, states_BGTK: Tensor) -> Tensor:
        assert held is not None
        at, rows = self.at, states_BGTK.shape[0]
        place = held[:rows, :, at.first : at.end]
        if at.fresh_BT is not None:
            states_BGTK = torch.where(at.fresh_BT[:, None, :, None], states_BGTK, place)
        place.copy_(states_BGTK)
        return held[:rows, :, at.start : at.end]

    def get_seq_length(self) -> int:
        return self.at.first - self.at.start

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.at.first - self.at.start + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def lay_out_again(self, used: slice, to: int) -> None:
        """Reallocates to the size in `_Pass`, and copies the used columns of all rows to start at ``to``."""
        for name in ("keys", "values"):
            held = getattr(self, name)
            if held is not None:
                fresh = self._zeros(held)
                fresh[: held.shape[0], :, to : to + used.stop - used.start] = held[:, :, used]
                setattr(self, name, fresh)


class RowCache(Cache):
    """Keys and values of up to S sequences.

    Attributes:
        starts: the first column of each row.
        end: the column after the last token.
    """

    def __init__(self, layers: int, states: Collection[int] = (), indexed: Collection[int] = ()) -> None:
        """
        Args:
            states: numbers of the layers that carry a state instead of keys and values.
            indexed: numbers of the layers with an indexer, which keeps keys of its own.
        """
        self._at = _Pass(0, 0)
        every = [StateLayer() if number in states else _Layer(self._at) for number in range(layers)]
        self._indexers = {number: _Layer(self._at) for number in indexed}
        self._layers = [*(layer for layer in every if isinstance(layer, _Layer)), *self._indexers.values()]
        self._states = [layer for layer in every if isinstance(layer, StateLayer)]
        super().__init__(layers=list(every))
        self.starts: list[int] = []
        self.end = 0
        self._written: list[int] = []  # per row, the column after the tokens written before the pass

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:
        """Writes an indexer's keys, shape (B, T, K), and returns those of all columns. They have no values."""
        keys_B1TK = indexer_key_states[:, None]
        return self._indexers[layer_idx].update(keys_B1TK, keys_B1TK[..., :0])[0][:, 0]

    @staticmethod
    def tokens_for(lengths: Sequence[int]) -> int:
        """Returns the most tokens for which rows of these lengths take memory."""
        return len(lengths) * max(int(max(lengths) * SPARE), STEP)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row."""
        return [self.end - start for start in self.starts]

    @property
    def nbytes(self) -> int:
        """Allocated bytes of keys and values."""
        return sum(keys.nbytes + values.nbytes for keys, values in self._held())

    @property
    def token_bytes(self) -> int:
        """Bytes of the keys and values of one token."""
        return self.nbytes // max(1, self._at.rows * self._at.columns)

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of one row."""
        return sum(x[0].nbytes for layer in self._states for x in layer.held)

    def _held(self) -> list[tuple[Tensor, Tensor]]:
        return [(x.keys, x.values) for x in self._layers if x.keys is not None and x.values is not None]

    def begin(self, tokens: int, device: torch.device) -> tuple[Tensor | None, Tensor]:
        """Opens the next columns for a pass.

        Returns:
            (the pass' attention mask, shape (B, columns), None if every row uses every column; positions of its
            tokens, shape (B, T)).
        """
        self._reserve(len(self.starts), self.end + tokens)
        for layer in self._states:
            layer.begin(len(self.starts))
        at = self._at
        at.start, at.first, at.end = min(self.starts), self.end, self.end + tokens
        starts_B1 = torch.tensor(self.starts)[:, None]
        columns = torch.arange(at.start, at.end)
        new = columns[-tokens:]
        positions_BT = (new - starts_B1).clamp_(min=0).to(device)
        written = torch.tensor(self._written)[:, None]
        at.fresh_BT = None
        if any(column > at.first for column in (*self.starts, *self._written)):
            at.fresh_BT = ((new >= written) & (new >= starts_B1)).to(device)
        full = all(start == at.start for start in self.starts)
        return None if full else (columns >= starts_B1).to(device), positions_BT

    def at_hand(self) -> AbstractContextManager[None]:
        """Context of the pass: attention reads the keys and values that `_Layer.update` returns."""
        return nullcontext()

    def advance(self, tokens: int) -> None:
        """Ends a pass."""
        self.end += tokens

    def open(self, lengths: Sequence[int], known: Sequence[Kept | None]) -> None:
        """Lays out rows of these lengths in an empty cache, with the keys and values of their first tokens.

        The next pass starts at the first column that is not known in some row.
        """
        width = max(lengths)
        self._reserve(len(lengths), width)
        self.starts = [width - length for length in lengths]
        self._written = [self._fill(row, start, known[row]) for row, start in enumerate(self.starts)]
        self.end = min(self._written)

    def add(self, kept: Kept) -> None:
        """Adds a row, aligned at its end."""
        length, row = kept[0][0].shape[1], len(self.starts)
        if not self.starts:
            self.end = 0
        self._reserve(row + 1, max(self.end, length), by=max(0, length - self.end))
        if not self.starts:
            self.end = length
        self.starts.append(self.end - length)
        self._written.append(self._fill(row, self.end - length, kept))

    def kept(self, row: int) -> Kept:
        """Returns views of a row's keys, values and states; they change with the cache."""
        columns = slice(self.starts[row], self.end)
        held = tuple((keys[row, :, columns], values[row, :, columns]) for keys, values in self._held())
        return held + tuple(layer.kept(row) for layer in self._states)

    def drop(self, row: int) -> None:
        """Removes a row; the last row takes its index."""
        last = len(self.starts) - 1
        if row != last:
            columns = slice(self.starts[last], self.end)
            for pair in self._held():
                for held in pair:
                    held[row, :, columns] = held[last, :, columns]
            for layer in self._states:
                layer.put(row, layer.kept(last))
            self.starts[row], self._written[row] = self.starts[last], self._written[last]
        self.starts.pop()
        self._written.pop()

    def _fill(self, row: int, column: int, kept: Kept | None) -> int:
        """Writes keys and values into a row from a column on, and its states; returns the column after them."""
        if kept is None:
            return column
        end = column + kept[0][0].shape[1]
        for state_layer, states in zip(self._states, kept[len(self._layers) :], strict=True):
            state_layer.reserve(self._at.rows, states)
            state_layer.put(row, states)
        for layer, (keys, values) in zip(self._layers, kept[: len(self._layers)], strict=True):
            if not layer.is_initialized:
                layer.lazy_initialization(keys[None], values[None])
            assert layer.keys is not None and layer.values is not None
            layer.keys[row, :, column:end] = keys
            layer.values[row, :, column:end] = values
        return end

    def _reserve(self, rows: int, end: int, *, by: int = 0) -> None:
        """Makes room for rows and for columns before ``end``; shifts the content by ``by`` columns."""
        at, used = self._at, slice(min(self.starts, default=0), self.end)
        enough = rows <= at.rows and end <= at.columns
        if enough and not by:
            return
        if rows > at.rows:
            at.rows = max(rows, 2 * at.rows)
        if end > at.columns:
            by = by or -used.start
            width = end + min(by, 0)
            if width + width // 4 > at.columns:
                at.columns = -(-int(width * SPARE) // STEP) * STEP
        for layer in self._layers:
            layer.lay_out_again(used, used.start + by)
        self.starts = [start + by for start in self.starts]
        self._written = [column + by for column in self._written]
        self.end += by
