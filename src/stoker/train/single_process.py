"""The engine of a single process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from stoker.hardware.process_device import Device
from stoker.models.objective import Reading, likeliest
from stoker.train.engine import Counts, Totals
from stoker.train.part_passes import evaluating, forward, forward_backward, read, totals_of, zero_loss
from stoker.train.task import Part, Task

if TYPE_CHECKING:
    from stoker.generate.decoder import Decoder

T = TypeVar("T")


class SingleProcess:
    """The engine of a single process."""

    first, replicas = True, 1

    def __init__(self, task: Task, device: Device, parameters: Sequence[nn.Parameter]) -> None:
        self._task, self._device, self._parameters = task, device, parameters

    def share(self, first: int, last: int, batch: int) -> tuple[int, int]:
        return first, last

    def rng_stream(self) -> int:
        return 0

    def gather(self, mine: Callable[[], list[T]]) -> list[T]:
        return mine()

    def count(self, parts: Sequence[Part]) -> Counts:
        targets = sum(p.targets for p in parts)
        return Counts(targets, sum(p.tokens for p in parts), len(parts), targets)

    def train(self, parts: Sequence[Part], counts: Counts, scaler: torch.amp.GradScaler) -> Tensor:
        total = zero_loss(self._device)
        for part in parts:
            total += forward_backward(self._task, self._device, part, counts, scaler).to(total.device)
        return total

    def clip(self, limit: float) -> Tensor:
        norm = torch.nn.utils.get_total_norm([p.grad for p in self._parameters if p.grad is not None])
        if limit:
            torch.nn.utils.clip_grads_with_norm_(self._parameters, limit, norm)
        return norm

    def add_up(self, alike: Tensor, each: Tensor) -> Tensor:
        return torch.cat([alike, each])

    def evaluate(self, parts: Sequence[Part]) -> Totals:
        parts = self._task.complete(parts, self, len(parts))
        losses = [forward(self._task, self._device, part) for part in parts]
        return totals_of(losses, sum(part.targets for part in parts))

    @torch.no_grad()
    def read(self, parts: Sequence[Part], reading: Reading, passes: int, *, tuned: bool = True) -> list[Tensor]:
        with evaluating(self._task.model, tuned=tuned), self._device.autocast():
            return [read(self._task.root, part.row, reading) for part in parts]

    def decoder(self, context: int | None) -> Decoder | None:
        language = self._task.language
        if language is None:
            return None
        from stoker.generate.decoder import Decoder, blocked_weights

        blocked = blocked_weights(self._task.model, self._device)
        return Decoder(self._task.model, language, self._device, context, blocked=blocked)

    def continue_rows(self, rows: Sequence[np.ndarray]) -> list[int]:
        language = self._task.language
        assert language is not None
        parts = [Part(inputs, targets=0, tokens=0) for inputs in language.ask(rows, self._device.torch)]
        return [int(token) for tokens in self.read(parts, likeliest, len(parts)) for token in tokens]
