"""Totals of an evaluation whose processes compute different parts of the loss."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from stoker.hardware.process_device import Device
from stoker.train import distributed
from stoker.train.distributed import Distributed


@pytest.mark.parametrize(("theirs", "expected"), [((2.5, 0.0, 1.0), None), ((2.5, 3.0, 0.0), 3)])
def test_a_process_without_a_loss_counts_as_the_others_do(
    theirs: tuple[float, ...], expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipeline's first stage reports the accuracy that its last one counts, or none."""

    def all_reduce(sums: Tensor) -> None:
        sums += torch.tensor(theirs, dtype=sums.dtype)

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    monkeypatch.setattr(distributed, "parts_of_row", lambda mesh: 1)
    mesh: Any = SimpleNamespace(
        layout=SimpleNamespace(data=1), data_index=0, is_first=True, at=lambda axis: 0, groups={}
    )
    task: Any = SimpleNamespace(nothing=lambda: None, complete=lambda parts, *_: parts)
    pipeline: Any = SimpleNamespace(forward=lambda rows: [], stages=[])
    gradients: Any = None
    engine = Distributed(task, Device("cpu", "fp32", ""), mesh, root=None, pipeline=pipeline, gradients=gradients)
    found = engine.evaluate([])
    assert (found.loss, found.correct) == (2.5, expected)
