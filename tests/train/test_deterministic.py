"""``train.deterministic``: reproducible kernels while a run trains; an operation without one is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from running import run
from torch.profiler import profile

from stoker.errors import CannotRun
from stoker.train.deterministic import deterministic_kernels
from stoker.train.prepared import Prepared


def watched(seen: list[bool]) -> Any:
    """Notes in both passes whether torch takes reproducible kernels only."""

    def note(*_: Any) -> None:
        seen.append(torch.are_deterministic_algorithms_enabled())

    def watch(prepared: Prepared) -> None:
        weight = prepared.task.model.get_submodule("model.layers.0.mlp.down_proj")
        weight.register_forward_hook(note)
        weight.weight.register_hook(note)  # type: ignore[operator, union-attr]

    return watch


@pytest.mark.parametrize("asked", [True, False])
def test_both_passes_of_a_run_have_it_and_what_follows_has_not(base: Path, sft: dict[str, Any], asked: bool) -> None:
    seen: list[bool] = []
    job = {**sft, "tune": "full", "steps": 2, "train": {**sft["train"], "deterministic": asked}}
    run(base, job, before=watched(seen))
    assert len(seen) >= 4
    assert set(seen) == {asked}
    assert not torch.are_deterministic_algorithms_enabled()


def test_an_operation_without_such_a_kernel_is_named() -> None:
    with pytest.raises(CannotRun) as caught, deterministic_kernels(True):
        torch.zeros(2).put_(torch.tensor([0, 0]), torch.ones(2), accumulate=False)
    assert "train.deterministic: put_ has no deterministic kernel" in str(caught.value)
    assert not torch.are_deterministic_algorithms_enabled()


def test_memory_without_a_value_is_not_filled() -> None:
    filling = torch.utils.deterministic
    assert filling.fill_uninitialized_memory
    with deterministic_kernels(True):
        assert not filling.fill_uninitialized_memory
        with profile() as found:
            torch.empty(8)
        assert "aten::fill_" not in {event.key for event in found.key_averages()}
    assert filling.fill_uninitialized_memory


def test_other_errors_stay_what_they_are() -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), deterministic_kernels(True):
        torch.ones(2, 3) @ torch.ones(2, 3)
