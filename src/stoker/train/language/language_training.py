"""What a task declares that trains a language model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # every command loads this file, so it imports no torch
    from pathlib import Path

    from stoker.data.sequences import Document
    from stoker.job.load_job import LoadedJob
    from stoker.job.resolved import ResolvedJob
    from stoker.models.objective import Objective
    from stoker.models.text import TextSide
    from stoker.models.tuning.virtual_tokens import Drawn
    from stoker.train.engine import Engine
    from stoker.train.language.batch_extras import BatchExtras
    from stoker.train.language.language_task import LanguageTask


@dataclass(frozen=True, kw_only=True)
class LanguageTraining:
    """The loss of a language model, its samples and its metrics.

    Attributes:
        objective: the loss for a job; None for the cross entropy of each target.
        extras: extra inputs of a forward pass, for a job and the folder of its paths.
        samples: builds the task's samples, if they are not sequences of the corpus: called as `LanguageTask` is.
        first_values: initial weights that the task adds to the model, by name, where random ones are not best.
        facts: further lines that are printed before a run begins, by name.
        target: the unit that the loss and the accuracy are averaged over, such as ``token``, ``pair`` or ``answer``.
        perplexity: whether exp(loss) is a perplexity.
        details: further results of `stoker eval`, from (task, engine, documents, names of their sources).
    """

    objective: Callable[[ResolvedJob], Objective] | None = None
    extras: Callable[[LoadedJob, Path], BatchExtras] | None = None
    samples: Callable[[LoadedJob, Path, TextSide], Callable[..., LanguageTask]] | None = None
    first_values: Callable[[LoadedJob, Path], Drawn] | None = None
    facts: Callable[[LoadedJob, Path], Mapping[str, str]] = lambda *_: {}
    target: str = "token"
    perplexity: bool = True
    details: Callable[[LanguageTask, Engine, Sequence[Document], Sequence[str]], dict[str, Any]] | None = None
