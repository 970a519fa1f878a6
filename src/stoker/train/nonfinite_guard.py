"""The optimizer's step, taken where loss and gradient are finite: decided on the device, by all processes alike."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

from stoker.train.engine import Engine


@dataclass(frozen=True)
class StepNumbers:
    """What the host learns of a step once it has been launched.

    Attributes:
        loss: summed over the step's targets and the processes.
        grad_norm: L2 norm of the gradient before clipping.
        loss_is_finite, taken: whether the loss, and whether loss and gradient were finite, so that the step was
            taken.
        asked: whether a process was asked to stop.
    """

    loss: float
    grad_norm: float
    loss_is_finite: bool
    taken: bool
    asked: bool


class Guard:
    """Leaves out every step whose loss or gradient is not finite on any process.

    Weights, moments and buffers are then what they were, to the bit. A fused AdamW is told so on its device, as
    `torch.amp.GradScaler` tells it of an overflow: the host waits once a step, when all of it has been launched.
    Other optimizers cannot be told; for them the host looks before the step.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        scaler: torch.amp.GradScaler,
        passes: Engine,
        buffers: Sequence[Tensor] = (),
    ) -> None:
        """
        Args:
            buffers: what forward passes change (batch norm's averages), to be put back after a step left out.
        """
        self._optimizer, self._scaler, self._passes, self._buffers = optimizer, scaler, passes, buffers
        self._on_device = isinstance(optimizer, AdamW) and bool(optimizer.defaults.get("fused"))
        self._before: list[Tensor] = []

    def begin(self) -> None:
        """Before the forward passes."""
        self._before = [buffer.clone() for buffer in self._buffers]

    @torch.no_grad()
    def step(self, loss: Tensor, norm: Tensor, *, asked: bool) -> StepNumbers:
        """Takes the optimizer's step, or leaves it out.

        Args:
            loss: of this process, summed.
            norm: of the gradient of all processes.
            asked: whether this process was asked to stop.
        """
        norm = norm.to(loss)
        flags = torch.stack([norm.isfinite().logical_not().to(loss), torch.full_like(loss, float(asked))])
        total, odd, stops = self._passes.add_up(loss[None], flags).unbind()
        # The sum decides, not a process' own number: no two of them can differ.
        bad = (odd > 0) | total.isfinite().logical_not()
        if self._on_device:
            self._step_unless(bad)
            numbers = torch.stack([total, norm, stops, bad.to(total)]).tolist()
        else:
            numbers = torch.stack([total, norm, stops, bad.to(total)]).tolist()
            if not numbers[3]:
                self._optimizer.step()
        self._settle(bad)
        loss_sum, grad_norm, asked_by, left_out = numbers
        return StepNumbers(loss_sum, grad_norm, math.isfinite(loss_sum), not left_out, asked_by > 0)

    def _step_unless(self, bad: Tensor) -> None:
        optimizer = self._optimizer
        with torch._C.DisableTorchFunction():  # optimizers want it in single precision, also in verification
            optimizer.grad_scale, optimizer.found_inf = None, bad.float()  # type: ignore[attr-defined]
        try:
            optimizer.step()
        finally:
            del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]

    def _settle(self, bad: Tensor) -> None:
        """Puts the buffers back, and lets the loss scale shrink or grow by what all processes found."""
        for buffer, before in zip(self._buffers, self._before, strict=True):
            buffer.copy_(torch.where(bad.to(buffer.device), before, buffer))
        if self._scaler.is_enabled():
            for found in self._scaler._found_inf_per_device(self._optimizer).values():
                found.copy_(bad)
        self._scaler.update()
