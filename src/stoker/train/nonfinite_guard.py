"""The guard of the optimizer's step: it is taken only if loss and gradient are finite on every process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

from stoker.train.engine import Engine
from stoker.train.optim.low_precision_adamw import LowPrecisionAdamW


@dataclass(frozen=True)
class StepNumbers:
    """Numbers that the host reads from the device after a step has been launched.

    Attributes:
        loss: summed over the step's targets and the processes.
        grad_norm: L2 norm of the gradient before clipping.
        taken: whether loss and gradient were finite, so that the step was taken.
        asked: whether a process was asked to stop.
        sums: further measures, summed over the step's targets and the processes.
    """

    loss: float
    grad_norm: float
    taken: bool
    asked: bool
    sums: tuple[float, ...]


class NonfiniteGuard:
    """Skips every step whose loss or gradient is not finite on any process.

    Weights, moments and buffers then keep their values bitwise. A fused AdamW, and one with low-precision moments, gets
    a flag on its device, as `torch.amp.GradScaler` passes it an overflow: the host waits once a step, after all of it
    has been launched. Other optimizers take no flag; for them the host waits before the step, and also for those that
    step on the host, which could read a flag before the device has written it.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        scaler: torch.amp.GradScaler,
        engine: Engine,
        buffers: Callable[[], Sequence[Tensor]],
    ) -> None:
        """
        Args:
            buffers: returns the buffers that forward passes change or replace (batch norm's averages), which are
                restored after a skipped step.
        """
        self._optimizer, self._scaler, self._engine, self._buffers = optimizer, scaler, engine, buffers
        fused = isinstance(optimizer, AdamW) and bool(optimizer.defaults.get("fused"))
        self._takes_flag = fused or isinstance(optimizer, LowPrecisionAdamW)
        self._before: list[Tensor] = []

    def begin(self) -> None:
        """Saves the buffers; called before the forward passes."""
        self._before = [buffer.clone() for buffer in self._buffers()]

    @torch.no_grad()
    def step(self, loss: Tensor, norm: Tensor, sums: Tensor | None = None, *, asked: bool) -> StepNumbers:
        """Takes or skips the optimizer's step.

        Args:
            loss: summed loss of this process.
            norm: norm of the gradient over all processes.
            sums: further measures of this process, shape (measures,).
            asked: whether this process was asked to stop.
        """
        norm = norm.to(loss)
        flags = torch.stack([norm.isfinite().logical_not().to(loss), torch.full_like(loss, float(asked))])
        alike = loss[None] if sums is None else torch.cat([loss[None], sums])
        added = self._engine.add_up(alike, flags)
        total, (odd, stops), sums = added[0], added[-2:], added[1:-2]
        # The sum decides instead of a process' own number, so that all decide alike.
        bad = (odd > 0) | total.isfinite().logical_not()
        on_device = self._takes_flag and all(p.device == bad.device for p in self._parameters())
        if on_device:
            self._step_unless(bad)
        numbers = torch.cat([torch.stack([total, norm, stops, bad.to(total)]), sums]).tolist()
        loss_sum, grad_norm, asked_by, left_out, *measured = numbers
        if not on_device and not left_out:
            self._optimizer.step()
        if on_device and left_out and isinstance(self._optimizer, LowPrecisionAdamW):
            self._optimizer.count_back()
        self._settle(bad)
        return StepNumbers(loss_sum, grad_norm, not left_out, asked_by > 0, tuple(measured))

    def _parameters(self) -> Iterator[Tensor]:
        return (parameter for group in self._optimizer.param_groups for parameter in group["params"])

    def _step_unless(self, bad: Tensor) -> None:
        optimizer = self._optimizer
        with torch._C.DisableTorchFunction():  # optimizers need single precision, in verification too
            optimizer.grad_scale, optimizer.found_inf = None, bad.float()  # type: ignore[attr-defined]
        try:
            optimizer.step()
        finally:
            del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]

    def _settle(self, bad: Tensor) -> None:
        """Restores the buffers after a skipped step, and updates the loss scale from the result of all processes."""
        for buffer, before in zip(self._buffers(), self._before, strict=True):
            buffer.copy_(torch.where(bad.to(buffer.device), before, buffer))
        if self._scaler.is_enabled():
            for found in self._scaler._found_inf_per_device(self._optimizer).values():
                found.copy_(bad)
        self._scaler.update()
