"""Page-locked copies: large ones take the memory that they need, and it is unlocked after their owner's end."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor

from stoker.parallel.offload import page_locked
from stoker.parallel.offload.page_locked import page_locked_like


class Driver:
    """What the driver has locked, by address, and whether it refuses."""

    def __init__(self, *, refuses: bool) -> None:
        self.locked: dict[int, int] = {}
        self._refuses = refuses

    def cudaHostRegister(self, address: int, size: int, _: int) -> int:
        if not self._refuses:
            self.locked[address] = size
        return int(self._refuses)

    def cudaHostUnregister(self, address: int) -> None:
        del self.locked[address]


class Owner:
    """Lives as long as its copies are used."""


@pytest.mark.parametrize("refuses", [False, True])
@pytest.mark.parametrize("large", [False, True])
def test_only_large_copies_are_locked_afterwards(large: bool, refuses: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    driver, owner, reserved = Driver(refuses=refuses), Owner(), []
    empty_like = torch.empty_like

    def logged(tensor: Tensor, *, pin_memory: bool = False, **how: Any) -> Tensor:
        reserved.append(pin_memory)
        return empty_like(tensor, **how)

    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr(torch, "empty_like", logged)
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: None)  # takes the driver's error, and needs a GPU
    monkeypatch.setattr(page_locked, "LEAST_BYTES", 40 if large else 41)
    copy = page_locked_like(torch.ones(10), owner)
    assert copy.shape == (10,)
    assert reserved[-1] != (large and not refuses)
    assert driver.locked == ({copy.data_ptr(): 40} if large and not refuses else {})
    del owner
    gc.collect()
    assert not driver.locked
