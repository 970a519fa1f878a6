"""A GPU's memory that runs out is told by moment, by what grew, and with the smallest change that fits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from running import run
from torch import Tensor

from stoker.errors import CannotRun
from stoker.runs.run_folder import RunFolder
from stoker.train.prepared import Prepared


class RunsOut(torch.autograd.Function):
    """The identity, whose backward pass finds no memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")


def running_out(moment: str, at_call: int) -> Any:
    """Spoils a prepared run: the given pass finds no memory."""

    def spoil(prepared: Prepared) -> None:
        layer = prepared.task.model.get_submodule("model.layers.1")
        calls = 0

        def hook(module: Any, arguments: Any, output: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls != at_call:
                return output
            if moment == "forward":
                raise torch.OutOfMemoryError("CUDA out of memory")
            return RunsOut.apply(output) if isinstance(output, Tensor) else (RunsOut.apply(output[0]), *output[1:])

        layer.register_forward_hook(hook)

    return spoil


@pytest.mark.parametrize("moment", ["forward", "backward"])
def test_the_pass_is_named_and_a_smaller_micro_batch_is_proposed(base: Path, sft: dict[str, Any], moment: str) -> None:
    job = {**sft, "tune": "full", "steps": 4, "evaluate": {"fraction": 0.0}}
    job["train"] = {**sft.get("train", {}), "batch": 4, "micro_batch": 4}

    with pytest.raises(CannotRun) as caught:
        run(base, job, before=running_out(moment, at_call=3))

    said = str(caught.value)
    assert f"out of memory in step 3, in the {moment} pass: weights 0." in said
    assert "beyond the prediction" in said
    assert "by prediction train.micro_batch=2 fits" in said
    assert caught.value.exit_code == 3
    assert RunFolder(base / "run").read_events()[-1]["event"] == "failed"


def test_what_is_proposed_is_predicted_to_need_less(base: Path, sft: dict[str, Any]) -> None:
    job = {**sft, "tune": "full", "steps": 2, "evaluate": {"fraction": 0.0}}
    job["train"] = {**sft.get("train", {}), "batch": 1, "micro_batch": 1}

    with pytest.raises(CannotRun) as caught:
        run(base, job, before=running_out("forward", at_call=2))

    assert "micro_batch" not in str(caught.value)
    assert "parallel.recompute=full" in str(caught.value) or "no change of" in str(caught.value)
