"""Objective of `task: reward`: the Bradley-Terry loss of the scores of pairs, and its measures.

Shapes: N targets (the ends of answers), R rows (answers), P pairs of them, the chosen one first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from stoker.data.sequences import Document
from stoker.errors import UserError
from stoker.job.load_job import LoadedJob
from stoker.models.attention.collate import Inputs, Row, cut_after_last_target
from stoker.models.head import Head, LogitsHead
from stoker.models.objective import Loss, Measures
from stoker.models.score_head import OFFSET, score_head_of, scores
from stoker.models.tuning.adapters import unwrap
from stoker.train.language.batch_extras import BatchExtras

if TYPE_CHECKING:
    from stoker.train.engine import Engine
    from stoker.train.language.language_task import LanguageTask
    from stoker.train.tasks.reward import RewardBlock

MARGIN = "margin"
NOT_CENTRED = "0: nothing is held out to centre the scores on; write evaluate.fraction or evaluate.data"


def answer_scores(hidden_ND: Tensor, inputs: Inputs, head: Head | LogitsHead) -> Tensor:
    """Returns the score of each answer, before the offset, shape (R,)."""
    return inputs.sum_by_document(scores(hidden_ND, head))


def bradley_terry(chosen_P: Tensor, rejected_P: Tensor, margin_P: Tensor | float = 0.0) -> Tensor:
    """-log sigmoid of the score difference (Ouyang et al., 2022, equation 1) minus a margin (Touvron et al., 2023,
    "Llama 2", equation 2); shape (P,).
    """
    return -logsigmoid(chosen_P - rejected_P - margin_P)


class RewardObjective:
    """Loss of a job's ``reward`` block, over pairs."""

    def __init__(self, block: RewardBlock) -> None:
        self._block = block
        self.measures = Measures("accuracy", "margin", "chosen_score", "rejected_score")

    def __call__(self, hidden_ND: Tensor, inputs: Inputs, head: Head | LogitsHead) -> Loss:
        chosen_P, rejected_P = answer_scores(hidden_ND, inputs, head).view(-1, 2).unbind(1)
        margin_P: Tensor | float = 0.0
        if self._block.margin and inputs.rows:
            margin_P = self._block.margin * inputs.given[MARGIN].to(chosen_P).view(-1, 2)[:, 0]
        loss_P = bradley_terry(chosen_P, rejected_P, margin_P)
        if self._block.center:  # Eisenstein et al., 2023, "Helping or Herding?", equation 2
            loss_P = loss_P + self._block.center * (chosen_P + rejected_P) ** 2
        right_P = chosen_P > rejected_P
        self.measures.add(
            inputs,
            accuracy=right_P.sum().to(chosen_P),
            margin=(chosen_P - rejected_P).sum(),
            chosen_score=chosen_P.sum(),
            rejected_score=rejected_P.sum(),
        )
        return Loss(inputs.counted_once(loss_P.sum()), inputs.counted_once(right_P.sum()))


class RewardExtras(BatchExtras):
    """Extra inputs of reward training: targets at the end of answers, and the margins of rows."""

    def __init__(self, loaded: LoadedJob, block: RewardBlock) -> None:
        self._loaded, self._block = loaded, block

    def as_row(self, document: Document) -> Row:
        """Returns the document with one target after its last trained token, where the score is read."""
        ids, _ = cut_after_last_target((document.row.ids, document.row.trained))
        return np.append(ids, ids[-1]), np.arange(len(ids) + 1) == len(ids)

    def of_rows(self, documents: Sequence[Document]) -> Mapping[str, np.ndarray]:
        return {MARGIN: np.array([document.row.margin for document in documents], np.float32)}

    def begin(self, task: LanguageTask, engine: Engine) -> None:
        """Raises UserError if margins are configured and no row has one."""
        caches = task.corpus.sequences.caches
        if self._block.margin and not any(cache.column("margin").any() for cache in caches):
            message = "no row has a margin"
            hint = "give rows a column `margin`, or `chosen_score` and `rejected_score`, or remove `reward.margin`"
            raise UserError(self._loaded.problem("reward.margin", message, hint))

    def evaluated(self, task: LanguageTask, measures: Mapping[str, float]) -> None:
        """Sets the offset so that the mean score of held-out chosen answers is 0 (Stiennon et al., 2020,
        section 3.4).
        """
        for head in heads_of(task.model):
            getattr(head, OFFSET).fill_(measures["chosen_score"])


def heads_of(model: nn.Module) -> list[nn.Linear]:
    """Returns the score head of a model, or those of this process' stages."""
    parts = list(model) if isinstance(model, nn.ModuleList) else [model]
    found = [score_head_of(unwrap(part)) for part in parts]
    return [head for head in found if head is not None and hasattr(head, OFFSET)]


def offset_of(model: nn.Module) -> float:
    """Returns the offset that is subtracted from a model's scores."""
    (head,) = heads_of(model)
    offset = getattr(head, OFFSET)
    assert isinstance(offset, torch.Tensor)
    return float(offset)
