"""What the loop asks of a task."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from torch import nn

from stoker.models.language_model import LanguageModel
from stoker.models.objective import Loss


@dataclass(frozen=True)
class Part:
    """One forward pass of a micro-batch.

    Attributes:
        inputs: what the task's ``loss`` takes.
        targets: trained tokens (or samples): what the summed loss is divided by, over the whole step.
        tokens: tokens (or samples) that go through the model.
    """

    inputs: object
    targets: int
    tokens: int


class Task(Protocol):
    """Samples and their loss. Samples are numbered over the whole run; a number is always the same sample."""

    model: nn.Module
    unit: str  # what goes through the model: "token" or "sample"
    target: str  # what the loss is the mean over: see `stoker.job.task.TaskSpec`
    perplexity: bool  # whether exp(loss) is one

    @property
    def language(self) -> LanguageModel | None:
        """How rows are laid out; None where they are none."""

    def epoch_samples(self, epochs: float) -> int:
        """Samples in so many epochs."""

    def parts(self, first: int, last: int) -> list[Part]:
        """The forward passes of samples first .. last-1, which make one micro-batch."""

    def nothing(self) -> Part:
        """A part whose loss and gradients are zero, for a process that has fewer parts than others."""

    def around(self, part: Part) -> AbstractContextManager[None]:
        """What encloses the forward and the backward pass of a part."""

    def loss(self, part: Part) -> Loss:
        """The forward pass."""

    def evaluation(self) -> Iterable[Part]:
        """The held-out samples, always the same; empty where there are none."""

    def describe_samples(self, first: int, last: int) -> list[str]:
        """Where samples come from, for people: ``file:row``."""
