"""The forward and backward pass of one part of a step, as every engine runs it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from stoker.hardware.process_device import Device
from stoker.models.attention.collate import Inputs
from stoker.models.attention.packed_row import row_of
from stoker.models.objective import Loss, Reading
from stoker.train.engine import Counts, Totals
from stoker.train.task import Part, Task


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Puts a model into evaluation mode; afterwards each module has its own mode again, such as a frozen batch norm."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:  # a module comes before those within it
            if module.training != training:
                module.train(training)


@contextmanager
def evaluating(model: nn.Module, *, tuned: bool) -> Iterator[None]:
    """Puts a model into evaluation mode, without its adapter unless `tuned`, and back."""
    # Local, since peft takes seconds to import and only language models need it.
    from stoker.models.tuning.adapters import without_adapter

    with evaluation_mode(model), nullcontext() if tuned else without_adapter(model):
        yield


def read(root: Callable[..., Any], inputs: Inputs, reading: Reading) -> Tensor:
    """Returns the reading of a forward pass of `CausalLoss`, or of a layout's module around it."""
    with row_of(inputs):
        found: tuple[Tensor] = root(inputs, reading=reading)
        return found[0]


def forward(task: Task, device: Device, part: Part) -> Loss:
    """Returns the loss of a part."""
    with task.around(part), device.autocast():
        return task.loss(part)


def forward_backward(task: Task, device: Device, part: Part, counts: Counts, scaler: torch.amp.GradScaler) -> Tensor:
    """Adds a part's share of the gradient of the mean loss; returns its summed loss, on the device."""
    with task.around(part):
        with device.autocast():
            loss = task.loss(part).total
        scaler.scale(loss / max(1, counts.of_island)).backward()
    return loss.detach()


def totals_of(losses: Sequence[Loss], targets: int) -> Totals:
    """Sums the losses of passes over some targets; waits for the device."""
    known = [int(loss.correct) for loss in losses if loss.correct is not None]
    correct = sum(known) if len(known) == len(losses) else None
    return Totals(sum(float(loss.total) for loss in losses), correct, targets)


def zero_loss(device: Device) -> Tensor:
    """Returns a zero in the highest precision of the device."""
    # Apple's GPUs have no float64.
    return torch.zeros((), dtype=torch.float64, device="cpu" if device.type == "mps" else device.torch)
