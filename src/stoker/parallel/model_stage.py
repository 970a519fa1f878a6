"""The modules that are sharded, replicated or pipelined: a model, or some of its blocks, with its loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from stoker.models.attention.collate import Inputs
from stoker.models.attention.packed_row import row_of
from stoker.models.autocast import in_bfloat16
from stoker.models.head import VALUE_HEAD, Head
from stoker.models.language_model import LanguageModel
from stoker.models.objective import Loss, Objective, Reading
from stoker.models.router_balance import RouterBalance, add_auxiliary_gradient, collect_router_logits, with_auxiliary
from stoker.parallel.collectives import copy_to, gather_parts
from stoker.parallel.mesh import Mesh

T = TypeVar("T")


class UnsplitModel(nn.Module):
    """A causal language model whose forward pass ends in the loss.

    The loss is inside, as the head's weights are gathered for this forward pass only.
    """

    def __init__(
        self, language: LanguageModel, mesh: Mesh, objective: Objective, critic: UnsplitModel | None = None
    ) -> None:
        super().__init__()
        self.model, self.critic = language.model, critic
        self.language, self.mesh, self.objective = language, mesh, objective

    def forward(self, inputs: Inputs | Callable[[], T], *, reading: Reading | None = None) -> Loss | tuple[Tensor] | T:
        """Computes the `Loss` of this process' targets.

        Args:
            inputs: the inputs, or a function that is called while the weights are gathered; its result is returned.
            reading: returns (its reading) instead.
        """
        if not isinstance(inputs, Inputs):
            return inputs()
        language, mesh = self.language, self.mesh
        if self.critic is not None and language.critic is not None and language.critic.at_work:
            found: Loss | tuple[Tensor] = self.critic(inputs, reading=reading)
            return found
        if language.head is None or not language.packs:
            return (language.read(inputs, reading),) if reading else language.loss(inputs, self.objective)
        with collect_router_logits(language.balance, inputs) as at_work:
            hidden = hidden_states(self.model, inputs, mesh)
            hidden = inputs.predicting(_to_head(hidden, mesh, self.model, language.head))
            if reading is not None:
                return (reading(hidden, inputs, language.head),)
            loss = self.objective(hidden, inputs, language.head)
            return loss._replace(total=add_auxiliary_gradient(loss.total, at_work))


class ModelStage(nn.Module):
    """Some of a model's blocks; with the embedding on the first stage, with head and loss on the last.

    A schedule passes only the numbers of micro-batches; their inputs are in `rows`.
    """

    def __init__(
        self,
        model: Any,
        head: Head | None,
        mesh: Mesh,
        objective: Objective,
        *,
        first: bool,
        dtype: torch.dtype,
        embedded: torch.dtype,
        balance: RouterBalance | None = None,
    ) -> None:
        """
        Args:
            dtype: of the hidden states that it returns; a norm's would be float32 under autocast.
            embedded: dtype of embeddings, which rotary tables take over, on all stages.
        """
        super().__init__()
        self.balance, self.dtype, self.embedded = balance, dtype, embedded
        self.model, self.head, self.mesh, self.is_first = model, head, mesh, first
        self.objective = objective
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
        with row_of(inputs), collect_router_logits(self.balance, inputs) as at_work:
            hidden = hidden_states(self.model, inputs, self.mesh, None if self.is_first else x.to(self.embedded))
        if self.head is None:
            hidden = with_auxiliary(hidden.to(self.dtype), at_work, self.scale)
            return hidden.clone() if hidden._is_view() else hidden  # schedules detach it in place
        hidden = inputs.predicting(_to_head(hidden, self.mesh, self.model, self.head))
        if self.reading is not None:
            return self.reading(hidden, inputs, self.head)
        loss = self.objective(hidden, inputs, self.head)
        self.losses[index] = loss._replace(total=loss.total.detach())
        return torch.stack((add_auxiliary_gradient(loss.total, at_work) * self.scale,))


def hidden_states(model: Any, inputs: Inputs, mesh: Mesh, x: Tensor | None = None) -> Tensor:
    """Returns the last hidden states of this process' tokens, shape (1, T, D).

    Args:
        x: output of the previous stage; None on the first.
    """
    if x is None and mesh.layout.sequence:  # some bodies (GPT-2's) reshape hidden states to the shape of the ids
        x = model.get_input_embeddings()(inputs.ids)
    start = {"input_ids": inputs.ids} if x is None else {"inputs_embeds": x}
    return model.base_model(**start, position_ids=inputs.positions, use_cache=False).last_hidden_state


def _to_head(hidden_BTD: Tensor, mesh: Mesh, model: nn.Module, head: Head) -> Tensor:
    """Returns the input of the head: the hidden states of all tokens, on every tensor process.

    They are sent in bfloat16 if products are and only logits are computed from them: scores and values are computed in
    float32.
    """
    group = mesh.groups["tensor"]
    if group is None:
        return hidden_BTD
    only_logits = head.linear.out_features > 1 and not hasattr(model, VALUE_HEAD)
    hidden_BTD = in_bfloat16(hidden_BTD) if only_logits else hidden_BTD
    return gather_parts(hidden_BTD, 1, group) if mesh.layout.sequence else copy_to(hidden_BTD, group)
