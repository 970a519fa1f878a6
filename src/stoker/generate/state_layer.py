"""States of a layer with linear attention: the last inputs of its convolution, and the sum that it updates by token.

A state has no columns: it is that of all tokens of a row so far, and cannot be cut at an earlier one.

Shapes: S rows; the others are those of the model.
"""

from __future__ import annotations

from torch import Tensor
from transformers.cache_utils import LinearAttentionLayer


class StateLayer(LinearAttentionLayer):
    """The states of up to S rows, with the rows of a pass as transformers' own layer."""

    def __init__(self) -> None:
        super().__init__()
        self._held: tuple[Tensor, ...] = ()

    @property
    def held(self) -> tuple[Tensor, ...]:
        """Both states of all rows, each of shape (S, ...); empty before the first pass."""
        convolution, recurrent = self.conv_states[0], self.recurrent_states[0]
        if not self._held and convolution is not None and recurrent is not None:
            self._held = convolution, recurrent
        return self._held

    def begin(self, rows: int) -> None:
        """Opens the first rows for a pass, which updates them in place."""
        if self.held:
            self.conv_states[0], self.recurrent_states[0] = (states[:rows] for states in self.held)

    def kept(self, row: int) -> tuple[Tensor, Tensor]:
        """Returns views of a row's states."""
        convolution, recurrent = self.held
        return convolution[row], recurrent[row]

    def put(self, row: int, states: tuple[Tensor, Tensor]) -> None:
        """Copies states into a row."""
        for held, state in zip(self.held, states, strict=True):
            held[row] = state

    def reserve(self, rows: int, like: tuple[Tensor, Tensor]) -> None:
        """Makes room for rows whose states have these shapes."""
        if self.held and len(self.held[0]) >= rows:
            return
        fresh = tuple(state.new_zeros(rows, *state.shape) for state in like)
        for new, old in zip(fresh, self.held, strict=False):
            new[: len(old)] = old
        self._held = fresh
        self.conv_kernel_size[0] = like[0].shape[-1]
        for ready in (self.is_conv_states_initialized, self.is_recurrent_states_initialized, self.has_previous_state):
            ready[0] = True
