"""Copies between a device and the host that run beside both of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import torch
from torch import Tensor

Wait = Callable[[], None]  # returns when copies have been made


class Copies(Protocol):
    """Copies in one direction, made in the order in which they are asked for."""

    def begin(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> Wait:
        """Begins copies of sources into targets: (target, source). Neither may be written before the host has waited
        for them, and targets not read."""

    def follow_device(self) -> None:
        """Copies that are asked for from now on begin after all work that the device has been given so far."""

    def precede_device(self) -> None:
        """Work that the device is given from now on begins after all copies. The host does not wait."""


class CopyStream:
    """Copies on a CUDA stream of their own; the host's memory must be page-locked, or they block."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)

    def begin(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> Wait:
        with torch.cuda.stream(self._stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        return self._stream.record_event().synchronize

    def follow_device(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def precede_device(self) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._stream)


class CopyAtOnce:
    """Copies that have been made when they are asked for: where there is no such stream."""

    def begin(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> Wait:
        for target, source in pairs:
            target.copy_(source)
        return _nothing

    def follow_device(self) -> None:
        pass

    def precede_device(self) -> None:
        pass


def copies_of(device: torch.device) -> Copies:
    """Copies from or to a device."""
    return CopyStream(device) if device.type == "cuda" else CopyAtOnce()


def _nothing() -> None:
    pass
