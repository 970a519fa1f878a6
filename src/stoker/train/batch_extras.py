"""What a task adds to the inputs of its passes, beyond tokens: labels of rows, scores of a reference model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from stoker.data.sequences import Document
from stoker.models.collate import Row
from stoker.train.task import Part

if TYPE_CHECKING:
    from stoker.train.engine import Engine
    from stoker.train.language_task import LanguageTask


class BatchExtras:
    """Adds nothing; a task with more to add derives a class. What is added is in `Inputs.given`, by name."""

    def begin(self, task: LanguageTask, engine: Engine) -> None:
        """Computes what needs the first weights, before an earlier state is restored; a collective."""

    def as_row(self, document: Document) -> Row:
        """The tokens of a document, and which of them are trained."""
        return document.row.ids, document.row.trained

    def evaluated(self, task: LanguageTask, measures: Mapping[str, float]) -> None:
        """After an evaluation of the run, with what was measured, on every process."""

    needs_following = False
    """Whether `beside` needs to know the document after the last one."""

    def before_evaluation(self, documents: Sequence[Document]) -> None:
        """Computes what is needed of documents, in one process, with a model that is tuned already."""

    def beside(self, documents: Sequence[Document], following: Document | None) -> Sequence[Document]:
        """Documents of forward passes whose results `of_passes` needs: `stoker.train.task.Part.beside`.

        Args:
            following: the document after the last one.
        """
        return ()

    def of_rows(self, documents: Sequence[Document]) -> Mapping[str, np.ndarray]:
        """Values of documents by name, shape (documents,). May be called from another thread."""
        return {}

    def of_passes(self, parts: Sequence[Part], engine: Engine, passes: int) -> Sequence[Part]:
        """This process' parts with what takes forward passes of their own; a collective before those of the loss.

        Args:
            passes: of the process that has most parts.
        """
        return parts
