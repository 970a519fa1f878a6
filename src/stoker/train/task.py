"""What the loop asks of a task."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, is_dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

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
        inputs: what the task's ``loss`` takes.
        targets: trained tokens (or samples): what the summed loss is divided by, over the whole step.
        tokens: tokens (or samples) that go through the model.
        beside: inputs of further forward passes, which are read and not trained on.
        other_model: whether it goes through another model than the policy, as that of its own critic. These passes
            follow each other.
    """

    inputs: object
    targets: int
    tokens: int
    beside: tuple[object, ...] = ()
    other_model: bool = False

    def to(self, device: torch.device) -> Part:
        """The part on a device. A copy from page-locked memory goes on while the host does other things."""
        cuda = device.type == "cuda"
        return self._with(lambda t: t.to(device, non_blocking=cuda))

    def pinned(self) -> Part:
        """The part in page-locked memory."""
        return self._with(lambda t: t if t.is_cuda else t.pin_memory())

    def _with(self, change: Callable[[Tensor], Tensor]) -> Part:
        inputs, beside = with_tensors((self.inputs, self.beside), change)
        return replace(self, inputs=inputs, beside=beside)


def with_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A value with each of its tensors changed, within lists, tuples and dicts and as fields of a dataclass."""
    if isinstance(value, Tensor):
        return change(value)
    if is_dataclass(value) and not isinstance(value, type):
        fields = {name: v for name, v in vars(value).items() if isinstance(v, (Tensor, dict))}
        return replace(value, **{name: with_tensors(v, change) for name, v in fields.items()})
    if isinstance(value, dict):
        return {key: with_tensors(v, change) for key, v in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):  # a named tuple takes its fields one by one
        return type(value)(*(with_tensors(v, change) for v in value))
    return type(value)(with_tensors(v, change) for v in value) if isinstance(value, (list, tuple)) else value


class Task(Protocol):
    """Samples and their loss. Samples are numbered over the whole run; a number is always the same sample."""

    model: nn.Module
    unit: str  # what goes through the model: "token" or "sample"
    target: str  # what the loss is the mean over: see `stoker.job.task_spec.TaskSpec`
    measures: Measures | None  # of its objective
    perplexity: bool  # whether exp(loss) is one
    lays_out_ahead: bool
    """Whether `parts` may run beside a step: it draws no random numbers, and steps do not change what it gives."""

    @property
    def language(self) -> LanguageModel | None:
        """How rows are laid out; None where they are none."""

    @property
    def figures(self) -> Mapping[str, float]:
        """Other numbers of a step for the metrics, the same on every process."""

    def evaluate(self, engine: Engine) -> Evaluation | None:
        """How good the model is on what is held out; None where nothing is."""

    def epoch_samples(self, epochs: float) -> int:
        """Samples in a number of epochs."""

    def parts(self, first: int, last: int) -> list[Part]:
        """The forward passes of samples first .. last-1, which make one micro-batch, on the host."""

    def complete(self, parts: Sequence[Part], engine: Engine, passes: int) -> Sequence[Part]:
        """This process' parts with what takes forward passes of their own, such as the scores of a reference model.

        A collective, before the passes of a step and of an evaluation.

        Args:
            passes: of the process that has most parts.
        """

    def begin(self, engine: Engine, folder: RunFolder, optimizer: Optimizer) -> None:
        """What is computed from the first weights, before an earlier state is restored; a collective.

        Args:
            optimizer: whose states a task may move while it makes samples.
        """

    def reach(self, first: int, last: int, step: int, engine: Engine) -> Sequence[str]:
        """Makes the samples first .. last-1 of a step where they depend on the weights; a collective.

        Returns:
            What looks wrong in them, for people.
        """

    def judge(self, measures: Mapping[str, float]) -> Sequence[str]:
        """What looks wrong in what a step measured, for people."""

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
