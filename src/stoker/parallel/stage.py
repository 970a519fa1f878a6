"""What is sharded, replicated or pipelined: a model, or a stretch of its blocks, together with its loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from stoker.models import packed
from stoker.models.head import Head
from stoker.models.layout import LanguageModel
from stoker.models.rows import Inputs
from stoker.parallel.collectives import copy_to, gather_parts
from stoker.parallel.mesh import Mesh


class Whole(nn.Module):
    """A causal language model whose forward pass ends in the loss.

    The loss is inside, since the head's weights are gathered and let go with the forward pass they are used in.
    """

    def __init__(self, language: LanguageModel, mesh: Mesh) -> None:
        super().__init__()
        self.model = language.model
        self.language, self.mesh = language, mesh

    def forward(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """(summed cross entropy of this process' targets, how many of them were the most likely token)."""
        if self.language.head is None or not self.language.packs:
            return self.language.loss(inputs)
        return head_loss(self.language.hidden(inputs), inputs, self.language.head, self.mesh)


class Stage(nn.Module):
    """Some of a model's blocks; with the embedding if it is the first stage, with head and loss if the last.

    Micro-batches differ in more than the tensors that a schedule moves, so a schedule moves their numbers, and
    `rows` has the rest.
    """

    def __init__(self, model: Any, head: Head | None, mesh: Mesh, *, first: bool) -> None:
        super().__init__()
        self.model, self.head, self.mesh, self.is_first = model, head, mesh, first
        self.rows: list[Inputs] = []
        self.scale: float | Tensor = 1.0
        self.losses: dict[int, tuple[Tensor, Tensor]] = {}

    def forward(self, x: Tensor, number: Tensor) -> Tensor:
        """The hidden states after this stage, shape (1, T, D), or the scaled loss, shape (1,).

        Args:
            x: hidden states; not used by the first stage.
            number: of the micro-batch, shape (1,), on the CPU.
        """
        index = int(number)
        inputs = self.rows[index]
        start: dict[str, Tensor] = {"input_ids": inputs.ids} if self.is_first else {"inputs_embeds": x}
        with packed.segments(inputs.segments, inputs.across):
            body = self.model.base_model
            hidden = body(**start, position_ids=inputs.positions, use_cache=False).last_hidden_state
        if self.head is None:
            return hidden.clone() if hidden._is_view() else hidden  # schedules detach it in place
        loss, correct = head_loss(hidden, inputs, self.head, self.mesh)
        self.losses[index] = (loss.detach(), correct)
        return torch.stack((loss * self.scale,))


def head_loss(hidden_BTD: Tensor, inputs: Inputs, head: Head, mesh: Mesh) -> tuple[Tensor, Tensor]:
    """The loss of hidden states; with tensor processes, each computes with its own words."""
    return head.loss(to_head(hidden_BTD, mesh).flatten(0, 1)[inputs.predict], inputs.targets)


def to_head(hidden_BTD: Tensor, mesh: Mesh) -> Tensor:
    """Hidden states where the head begins: all tokens, on every tensor process."""
    group = mesh.groups["tensor"]
    return gather_parts(hidden_BTD, 1, group) if mesh.layout.sequence else copy_to(hidden_BTD, group)
