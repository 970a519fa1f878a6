"""Language-model task: samples are the sequences of a corpus, and the loss is the task's objective."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from stoker.data.corpus import Corpus
from stoker.data.sequences import Document
from stoker.grouping import grouped
from stoker.models.attention.collate import Inputs, empty_row
from stoker.models.attention.packed_row import row_of
from stoker.models.causal_loss import CausalLoss
from stoker.models.language_model import LanguageModel
from stoker.models.objective import Loss, Objective, next_token
from stoker.train.evaluate import Evaluation, evaluate
from stoker.train.hooks import Hook
from stoker.train.language.batch_extras import BatchExtras
from stoker.train.language.language_training import LanguageTraining
from stoker.train.task import Part, Task

if TYPE_CHECKING:
    from stoker.runs.run_folder import RunFolder
    from stoker.train.engine import Engine

HOST = torch.device("cpu")
EVALUATION_TOKENS = 4096  # per held-out forward pass: no activations are kept, so this is small


class LanguageTask(Task):
    """A task whose samples are the corpus' sequences.

    Without a corpus it can only evaluate given documents.
    """

    unit = "token"
    lays_out_ahead = True
    language: LanguageModel

    def __init__(
        self,
        model: nn.Module,
        language: LanguageModel,
        corpus: Corpus | None,
        device: torch.device,
        *,
        training: LanguageTraining,
        objective: Objective = next_token,
        extras: BatchExtras | None = None,
        unit_size: int = 1,
    ) -> None:
        """
        Args:
            model: holds the parameters, with its adapters around it.
            objective: the loss function on hidden states.
            extras: adds inputs beside tokens.
            unit_size: sequences of one data row, which stay in one forward pass.
        """
        self.model, self.language = model, language
        judged = training.target == "pair" and unit_size == 1  # KTO judges each answer
        self.target = "answer" if judged else training.target
        self.perplexity, self.unit_size = training.perplexity, unit_size
        self.root: Callable[..., Any] = CausalLoss(language, objective)  # or a layout's module
        self.measures = getattr(objective, "measures", None)
        self._extras = extras or BatchExtras()
        self._corpus = corpus
        self.device = device
        self.evaluation_tokens = EVALUATION_TOKENS

    @property
    def corpus(self) -> Corpus:
        assert self._corpus is not None
        return self._corpus

    def epoch_samples(self, epochs: float) -> int:
        return self.corpus.sequences.total(epochs)

    def parts(self, first: int, last: int) -> list[Part]:
        documents = [document for index in range(first, last) for document in self.corpus.sequences[index]]
        following = self.corpus.sequences[last][0] if documents and self._extras.needs_following else None
        # Evaluation may run meanwhile, so the model's current mode does not matter.
        return self.lay_out(documents, HOST, share=not self.language.dropout, following=following)

    def lay_out(
        self,
        documents: Sequence[Document],
        device: torch.device | None = None,
        *,
        share: bool | None = None,
        following: Document | None = None,
    ) -> list[Part]:
        """Lays documents out as forward passes, on the model's device by default; see `LanguageModel.lay_out`.

        Args:
            following: the document after the last one.
        """
        laid_out = self._inputs(documents, device, share, self.unit_size)
        parts = [Part(inputs, targets=self._count(inputs), tokens=inputs.tokens) for inputs in laid_out]
        if beside := self._extras.beside(documents, following):
            parts[0] = replace(parts[0], beside=tuple(self._inputs(beside, device, share, 1)))
        return parts

    def _inputs(
        self, documents: Sequence[Document], device: torch.device | None, share: bool | None, unit_size: int
    ) -> list[Inputs]:
        rows = [self._extras.as_row(document) for document in documents]
        given = self._extras.of_rows(documents)
        laid_out = self.language.lay_out(rows, device or self.device, share=share, unit_size=unit_size, given=given)
        balance = None if self.target == "token" else 1 / unit_size
        return [replace(inputs, balance=balance) for inputs in laid_out]

    def _count(self, inputs: Inputs) -> int:
        return len(inputs.targets) if self.target == "token" else inputs.rows // self.unit_size

    def around(self, part: Part) -> AbstractContextManager[None]:
        return row_of(part.row)

    def loss(self, part: Part) -> Loss:
        return Loss(*self.root(part.row))

    def complete(self, parts: Sequence[Part], engine: Engine, passes: int) -> Sequence[Part]:
        return self._extras.of_passes(parts, engine, passes)

    def begin(self, engine: Engine, folder: RunFolder, optimizer: Optimizer) -> None:
        self._extras.begin(self, engine)

    @property
    def evaluates(self) -> bool:
        return self.corpus.has_held_out

    def evaluate(self, engine: Engine) -> Evaluation | None:
        evaluation = evaluate(self, engine)
        if evaluation is not None:
            self._extras.evaluated(self, evaluation.measures)
        return evaluation

    @property
    def hooks(self) -> tuple[Hook, ...]:
        """Hooks of the task into the training step."""
        return ()

    def nothing(self) -> Part:
        row = empty_row(self.device)
        if not self.language.packs:
            row = replace(row, positions=None, segments=None)
        return Part(row, targets=0, tokens=0)

    def evaluation(self) -> Iterator[Part]:
        yield from self.evaluation_parts(self.corpus.evaluation_documents())

    def evaluation_parts(self, documents: Sequence[Document]) -> Iterator[Part]:
        """Groups held-out documents into forward passes of about ``evaluation_tokens``."""
        units = [documents[first : first + self.unit_size] for first in range(0, len(documents), self.unit_size)]
        groups = list(grouped(units, lambda unit: sum(len(d.row.ids) for d in unit), self.evaluation_tokens))
        for group, following in zip(groups, groups[1:] + groups[:1], strict=True):
            yield from self.lay_out([document for unit in group for document in unit], following=following[0][0])

    def describe_samples(self, first: int, last: int) -> list[str]:
        documents = (d for index in range(first, last) for d in self.corpus.sequences[index])
        return [":".join(map(str, self.corpus.sequences.origin(d))) for d in documents]
