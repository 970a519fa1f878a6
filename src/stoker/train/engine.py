"""The interface of a step's forward and backward passes: `SingleProcess` or `Distributed` runs them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from stoker.models.objective import Reading
from stoker.train.task import Part

if TYPE_CHECKING:
    from stoker.generate.decoder import Decoder

T = TypeVar("T")


@dataclass(frozen=True)
class Counts:
    """Sizes of a step, over all processes.

    Attributes:
        passes: maximum number of forward passes of a process.
        of_island: number of targets of this process' island, over which its gradient is averaged.
    """

    targets: int
    tokens: int
    passes: int
    of_island: int


@dataclass(frozen=True)
class Totals:
    """Sums over evaluated parts; ``correct`` is None if it cannot be counted."""

    loss: float
    correct: int | None
    targets: int


class Engine(Protocol):
    """Interface between the loop and the processes of a run."""

    first: bool
    """Whether this process writes files and prints."""
    replicas: int
    """Number of data-parallel replicas."""

    def share(self, first: int, last: int, batch: int) -> tuple[int, int]:
        """Returns this process' range of samples in a step."""

    def rng_stream(self) -> int:
        """Returns the index of this process' random stream; processes that must draw different numbers differ in it."""

    def gather(self, mine: Callable[[], list[T]]) -> list[T]:
        """Concatenates the lists of the data-parallel processes on every process. An error of one is raised on all."""

    def count(self, parts: Sequence[Part]) -> Counts:
        """Sums the sizes of all processes' parts."""

    def train(self, parts: Sequence[Part], counts: Counts, scaler: torch.amp.GradScaler) -> Tensor:
        """Runs forward and backward passes; returns this process' summed loss."""

    def clip(self, limit: float) -> Tensor:
        """Clips the gradients to a norm of ``limit`` (0: no clipping); returns their norm before."""

    def add_up(self, alike: Tensor, each: Tensor) -> Tensor:
        """Sums over the processes, on the device, without waiting on the host.

        Args:
            alike: values that are equal on tensor-parallel processes, of which only one is counted.
            each: values that are counted for every process.
        """

    def evaluate(self, parts: Sequence[Part]) -> Totals:
        """Runs forward passes without gradients; every process gets the same parts."""

    def read(self, parts: Sequence[Part], reading: Reading, passes: int, *, tuned: bool = True) -> list[Tensor]:
        """Returns the results of ``reading`` on forward passes of this process' parts, in evaluation mode, without
        gradients.

        With a pipeline only the last stage returns results; other processes return an empty list.

        Args:
            passes: maximum number of forward passes of a process; see `Counts`.
            tuned: whether the adapter is applied.
        """

    def decoder(self, context: int | None) -> Decoder | None:
        """Returns a decoder that generates with the current weights; None if rows are split over processes.

        Args:
            context: maximum number of tokens of a prompt with its answer.
        """

    def continue_rows(self, rows: Sequence[np.ndarray]) -> list[int]:
        """Returns the most likely next token of each row of token ids; every process gets the same rows."""
