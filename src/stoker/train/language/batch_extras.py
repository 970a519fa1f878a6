"""Inputs that a task adds to its forward passes beside tokens: labels of rows, scores of a reference model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from stoker.data.sequences import Document
from stoker.models.attention.collate import Row
from stoker.train.task import Part

if TYPE_CHECKING:
    from stoker.train.engine import Engine
    from stoker.train.language.language_task import LanguageTask


class BatchExtras:
    """Extra inputs of a task; this base adds none. Subclasses put theirs into `Inputs.given`, by name."""

    def begin(self, task: LanguageTask, engine: Engine) -> None:
        """Computes values that need the initial weights, before a checkpoint is restored; a collective."""

    def as_row(self, document: Document) -> Row:
        """Returns the tokens of a document, and which of them are trained."""
        return document.row.ids, document.row.trained

    def evaluated(self, task: LanguageTask, measures: Mapping[str, float]) -> None:
        """Called after an evaluation of the run with its measures, on every process."""

    needs_following = False
    """Whether `beside` needs to know the document after the last one."""

    def before_evaluation(self, documents: Sequence[Document]) -> None:
        """Computes values that the documents need, in one process, with a model that is trained already."""

    def beside(self, documents: Sequence[Document], following: Document | None) -> Sequence[Document]:
        """Returns documents for further forward passes whose results `of_passes` needs:
        `stoker.train.task.Part.beside`.

        Args:
            following: the document after the last one.
        """
        return ()

    def of_rows(self, documents: Sequence[Document]) -> Mapping[str, np.ndarray]:
        """Returns values of documents by name, shape (documents,). May be called from another thread."""
        return {}

    def of_passes(self, parts: Sequence[Part], engine: Engine, passes: int) -> Sequence[Part]:
        """Adds values to this process' parts that need forward passes; a collective before the passes of the loss.

        Args:
            passes: forward passes of the process with the most parts.
        """
        return parts
