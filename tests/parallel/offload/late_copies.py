"""Copies as late as a stream may make them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from stoker.parallel.offload.copy_stream import Wait


class LateCopies:
    """As copies on a stream are at their latest: made when somebody waits. Until then targets hold no numbers."""

    def __init__(self, log: list[str], way: str) -> None:
        self._log, self._way = log, way
        self._pending: list[tuple[Tensor, Tensor]] = []
        self._follows = False

    def begin(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> Wait:
        assert self._follows, "the device may not have computed what is copied, or still reads where it goes"
        mine = list(pairs)
        self._pending += mine
        for target, _ in mine:
            target.view(torch.uint8).fill_(255)
        self._log.append(f"{self._way} begins")
        last = mine[-1][0]

        def wait() -> None:
            self._make(upto=last)
            self._log.append(f"{self._way} waits")

        return wait

    def follow_device(self) -> None:
        self._follows = True

    def precede_device(self) -> None:
        self._make()
        self._follows = False

    def _make(self, upto: Tensor | None = None) -> None:
        while self._pending:  # in their order
            target, source = self._pending.pop(0)
            target.copy_(source)
            if target is upto:
                return
