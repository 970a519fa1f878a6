"""A stage of a pipeline: some of a model's blocks, with the loss on the last stage."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from stoker.models.attention.collate import Inputs
from stoker.models.attention.packed_row import row_of
from stoker.models.language_model import LanguageModel
from stoker.models.objective import Loss, Objective, Reading
from stoker.models.router_balance import collect_router_logits, with_auxiliary


class ModelStage(nn.Module):
    """Some of a model's blocks; with the embedding on the first stage, with head and loss on the last.

    A schedule passes only the numbers of micro-batches; their inputs are in `rows`.
    """

    def __init__(
        self, language: LanguageModel, objective: Objective, *, first: bool, dtype: torch.dtype, embedded: torch.dtype
    ) -> None:
        """
        Args:
            dtype: of the hidden states that it returns; a norm's would be float32 under autocast.
            embedded: dtype of embeddings, which rotary tables take over, on all stages.
        """
        super().__init__()
        self.model, self.language, self.objective = language.model, language, objective
        self.is_first, self.is_last = first, language.head is not None
        self.dtype, self.embedded = dtype, embedded
        self.rows: list[Inputs] = []
        self.scale: float | Tensor = 1.0
        self.losses: dict[int, Loss] = {}
        self.reading: Reading | None = None

    def forward(self, x: Tensor, number: Tensor) -> Tensor:
        """Returns the hidden states after this stage, shape (1, T, D), or the scaled loss, shape (1,).

        With a ``reading``, its result instead of the loss.

        Args:
            x: hidden states; not used by the first stage.
            number: of the micro-batch, shape (1,), on the CPU.
        """
        index = int(number)
        inputs = self.rows[index]
        received = None if self.is_first else x.to(self.embedded)
        with row_of(inputs):
            if not self.is_last:
                return self._sent(inputs, received)
            if self.reading is not None:
                return self.language.read(inputs, self.reading, received)
            loss = self.language.loss(inputs, self.objective, received)
        self.losses[index] = loss._replace(total=loss.total.detach())
        return torch.stack((loss.total * self.scale,))

    def _sent(self, inputs: Inputs, received: Tensor | None) -> Tensor:
        with collect_router_logits(self.language.balance, inputs) as at_work:
            hidden = self.language.hidden(inputs, received)
        hidden = with_auxiliary(hidden.to(self.dtype), at_work, self.scale)
        return hidden.clone() if hidden._is_view() else hidden  # schedules detach it in place
