"""A GPU's memory that runs out is told by moment, by what grew, and with the smallest change that fits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from running import run, write_job
from torch import Tensor, nn

from stoker.errors import CannotRun, UserError
from stoker.hardware.process_device import Device
from stoker.job.load_job import load_job
from stoker.job.resolved import ResolvedJob
from stoker.plan.memory.memory_formulas import STATES
from stoker.resilience.heartbeat import Heart
from stoker.runs.run_folder import RunFolder
from stoker.train.faults import out_of_memory
from stoker.train.prepare import prepare
from stoker.train.prepared import Prepared
from stoker.train.records.plan_prediction import predicted_for


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


def test_a_change_must_lower_the_prediction_by_more_than_its_error(
    base: Path, sft: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a tenth of what is not the training state; micro-batches of equal size come first."""
    train = {**sft["train"], "batch": 6, "micro_batch": 6}
    prepared = prepare(load_job(write_job(base, {**sft, "tune": "full", "train": train})), base)
    predicted = predicted_for(prepared, 1, 1)
    margin = 0.1 * sum(size for name, size in predicted.memory.items() if name not in STATES)
    assert margin > 0
    lower = {3: 0.9 * margin, 2: 1.1 * margin}  # by the size of the micro-batch

    def look(changed: Prepared, *_: Any) -> Any:
        return replace(predicted, upper=predicted.upper - lower.get(changed.job.train.micro_batch, 9 * margin))

    monkeypatch.setattr(out_of_memory, "predicted_for", look)
    assert "by prediction train.micro_batch=2 fits" in out_of_memory.smallest_change(prepared, predicted)


def test_gradients_that_share_a_bucket_count_once() -> None:
    model = nn.ParameterList([torch.zeros(1 << 20) for _ in range(8)])
    bucket = torch.zeros(8 << 20)
    for parameter, gradient in zip(model, bucket.split(1 << 20), strict=True):
        parameter.grad = gradient
    train = SimpleNamespace(micro_batch=1, seq_len=64)
    prepared: Any = SimpleNamespace(
        task=SimpleNamespace(model=model), device=Device("cpu", "fp32", ""), job=SimpleNamespace(train=train)
    )
    told = out_of_memory.reported_memory_errors(prepared, torch.optim.SGD(model), Heart(), None)
    with pytest.raises(CannotRun, match=r"weights 0\.03 GiB, gradients 0\.03 GiB, optimizer 0\.00 GiB"), told:
        raise torch.OutOfMemoryError


@pytest.mark.parametrize(
    ("keys", "refused"),
    [
        ("parallel.data=2", ""),
        ("train.optimizer=muon", "offload"),
        ("parallel.pipeline=2 parallel.schedule=zero-bubble", "recompute"),
        ("tune.method=prefix", "recompute"),
    ],
)
def test_nothing_is_proposed_that_the_job_excludes(
    base: Path, sft: dict[str, Any], keys: str, refused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_job(base, {**sft, "tune": {"method": "full"}})
    prepared = prepare(load_job(path), base)
    looked_at: list[ResolvedJob] = []

    def look(changed: Prepared, *_: Any) -> None:
        looked_at.append(changed.job)
        raise UserError("not predicted")

    predicted = predicted_for(prepared, 1, 1)
    monkeypatch.setattr(out_of_memory, "predicted_for", look)
    out_of_memory.smallest_change(replace(prepared, job=load_job(path, keys.split()).job), predicted)
    found = {("recompute", job.parallel.recompute) for job in looked_at}
    found |= {("offload", job.parallel.offload) for job in looked_at}
    assert found & {("recompute", "full"), ("offload", "optimizer")} == {
        pair for pair in (("recompute", "full"), ("offload", "optimizer")) if pair[0] != refused
    }
