"""The interface between the loop and a task."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, is_dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stoker.hardware.process_device import move_to
from stoker.models.attention.collate import Inputs
from stoker.models.objective import Loss, Measures

if TYPE_CHECKING:
    from stoker.models.language_model import LanguageModel
    from stoker.runs.run_folder import RunFolder
    from stoker.train.engine import Engine
    from stoker.train.evaluate import Evaluation


@dataclass(frozen=True)
class Part:
    """One forward pass of a micro-batch.

    Attributes:
        inputs: argument of the task's ``loss``.
        targets: trained tokens (or samples), by whose sum over the step the summed loss is divided.
        tokens: tokens (or samples) that pass through the model.
        beside: inputs of further forward passes, without training.
        other_model: whether it passes through another model than the policy, such as a separate critic. These passes
            are consecutive.
    """

    inputs: object
    targets: int
    tokens: int
    beside: tuple[object, ...] = ()
    other_model: bool = False

    @property
    def row(self) -> Inputs:
        """The inputs of a language model's pass."""
        assert isinstance(self.inputs, Inputs)
        return self.inputs

    def to(self, device: torch.device) -> Part:
        """Moves the part to a device. A copy from page-locked memory is asynchronous."""
        cuda = device.type == "cuda"
        return self._with(lambda t: move_to(t, device, non_blocking=cuda))

    def pinned(self) -> Part:
        """Copies the part to page-locked memory."""
        return self._with(lambda t: t if t.is_cuda else t.pin_memory())

    def _with(self, change: Callable[[Tensor], Tensor]) -> Part:
        inputs, beside = with_tensors((self.inputs, self.beside), change)
        return replace(self, inputs=inputs, beside=beside)


def with_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Applies a function to each tensor of a value, within lists, tuples, dicts and dataclass fields."""
    if isinstance(value, Tensor):
        return change(value)
    if is_dataclass(value) and not isinstance(value, type):
        fields = {name: v for name, v in vars(value).items() if isinstance(v, (Tensor, dict))}
        return replace(value, **{name: with_tensors(v, change) for name, v in fields.items()})
    if isinstance(value, dict):
        return {key: with_tensors(v, change) for key, v in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):  # a named tuple takes its fields as arguments
        return type(value)(*(with_tensors(v, change) for v in value))
    return type(value)(with_tensors(v, change) for v in value) if isinstance(value, (list, tuple)) else value


class Task(ABC):
    """A source of samples with a loss. Samples are numbered over the whole run; a number is always the same sample.

    The methods that are not abstract are hooks, which do nothing here.
    """

    model: nn.Module
    root: Callable[..., Any]  # the module that is called for a forward pass: the model, or a layout's wrapper around it
    unit: str  # unit of input: "token", "row" or "sample"
    target: str  # unit that the loss is averaged over: see `stoker.job.task_spec.TaskSpec`
    measures: Measures | None = None  # measures of its objective
    perplexity: bool  # whether exp(loss) is a perplexity
    lays_out_ahead: bool
    """Whether `parts` may run during a step: it draws no random numbers and does not depend on the weights."""

    language: LanguageModel | None = None  # lays rows out; None for other models
    figures: Mapping[str, float] = MappingProxyType({})
    """Further numbers of a step for the metrics, equal on every process."""

    note: Callable[[str], None] = print
    """Prints a line for people; the loop of the first process sets that of its display."""

    @property
    @abstractmethod
    def evaluates(self) -> bool:
        """Whether there is held-out data."""

    @abstractmethod
    def evaluate(self, engine: Engine) -> Evaluation | None:
        """Evaluates the model on held-out data; None without any."""

    @abstractmethod
    def epoch_samples(self, epochs: float) -> int:
        """Returns the samples in a number of epochs."""

    @abstractmethod
    def parts(self, first: int, last: int) -> list[Part]:
        """Returns the forward passes of samples first .. last-1, which make one micro-batch, on the host."""

    def complete(self, parts: Sequence[Part], engine: Engine, passes: int) -> Sequence[Part]:
        """Adds to this process' parts values that need forward passes, such as the scores of a reference model.

        A collective, before the passes of a step and of an evaluation.

        Args:
            passes: forward passes of the process with the most parts.
        """
        return parts

    def begin(self, engine: Engine, folder: RunFolder, optimizer: Optimizer) -> None:
        """Computes what depends on the initial weights, before a checkpoint is restored; a collective.

        Args:
            optimizer: optimizer, whose states a task may offload while it makes samples.
        """
        return

    def reach(self, first: int, last: int, step: int, engine: Engine) -> Sequence[str]:
        """Makes the samples first .. last-1 of a step where they depend on the weights; a collective.

        Returns:
            Alarms about them, for people.
        """
        return ()

    def after_passes(self, engine: Engine) -> Sequence[str]:
        """Completes what the passes of a step have computed for its samples; a collective, before `figures` are read.

        Returns:
            Alarms about the samples, for people.
        """
        return ()

    def judge(self, measures: Mapping[str, float]) -> Sequence[str]:
        """Returns alarms about a step's measures, for people."""
        return ()

    @abstractmethod
    def nothing(self) -> Part:
        """Returns a part with zero loss and gradients, for a process that has fewer parts than others."""

    @abstractmethod
    def around(self, part: Part) -> AbstractContextManager[None]:
        """Returns the context of a part's forward and backward pass."""

    @abstractmethod
    def loss(self, part: Part) -> Loss:
        """Runs the forward pass."""

    @abstractmethod
    def evaluation(self) -> Iterable[Part]:
        """Returns the held-out samples, always in the same order; empty if there are none."""

    @abstractmethod
    def describe_samples(self, first: int, last: int) -> list[str]:
        """Returns the origin of samples, for people: ``file:row``."""
