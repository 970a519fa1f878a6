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
from stoker.launch import worker
from stoker.launch.run_spec import RunSpec
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
        task=SimpleNamespace(model=model),
        device=Device("cpu", "fp32", ""),
        job=SimpleNamespace(task="sft", train=train),
    )
    told = out_of_memory.reported_memory_errors(prepared, torch.optim.SGD(model), Heart(), None)
    with pytest.raises(CannotRun, match=r"weights 0\.03 GiB, gradients 0\.03 GiB, optimizer 0\.00 GiB"), told:
        raise torch.OutOfMemoryError


def answering(moment: str) -> Any:
    """Spoils a prepared run of a policy: this function of its answers finds no memory."""

    def spoil(prepared: Prepared) -> None:
        def full(*_: Any, **__: Any) -> Any:
            raise torch.OutOfMemoryError("CUDA out of memory")

        if moment == "sampled":
            prepared.engine.decoder = full  # type: ignore[method-assign]
        elif moment == "scored":
            prepared.engine.read = full  # type: ignore[method-assign]
        else:
            prepared.task._collector._rewards = full  # type: ignore[attr-defined]

    return spoil


@pytest.mark.parametrize("moment", ["sampled", "rewarded", "scored"])
def test_the_part_of_a_round_of_answers_is_named(base: Path, sft: dict[str, Any], moment: str) -> None:
    (base / "asked.jsonl").write_text('{"prompt": "Say some words about the sea"}\n' * 8)
    grpo = {"rewards": ["length:1-8"], "prompts": 4, "answers": 2, "max_tokens": 8}
    job = {**sft, "task": "grpo", "data": "asked.jsonl", "steps": 2, "evaluate": {"fraction": 0.0}, "grpo": grpo}
    job["train"] = {"batch": 8, "micro_batch": 1, "seq_len": 64}

    with pytest.raises(CannotRun) as caught:
        run(base, job, before=answering(moment))

    assert f"out of memory in step 1, as answers were {moment}: weights " in str(caught.value)
    changes = [settings for settings, _ in out_of_memory._changes(prepare(load_job(base / "job.yaml"), base).job)]
    assert changes[0] == "grpo.offload_idle=True" and changes[-1].endswith("grpo.max_tokens=4")
    assert not any("seq_len" in settings for settings in changes)


def test_memory_that_runs_out_before_training_is_reported(
    base: Path, sft: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(worker, "prepare", full)
    spec = RunSpec(load_job(write_job(base, sft)), base, base / "run", quiet=True)
    with pytest.raises(CannotRun, match=r"out of memory as the model was prepared; `stoker plan` predicts"):
        worker.train(spec)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1 << 30, 8 << 30))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 2 << 30)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 3 << 30)
    said = "this process holds 2.00 of 8.00 GiB, and others 4.00 GiB"
    with pytest.raises(CannotRun, match=said), out_of_memory.reported_before_training(torch.device("cuda")):
        full()


def test_memory_below_the_prediction_has_not_grown(base: Path, sft: dict[str, Any]) -> None:
    prepared = prepare(load_job(write_job(base, sft)), base)
    predicted = predicted_for(prepared, 1, 1)
    much = replace(predicted, memory={**predicted.memory, "weights": 1e12, "gradients": 1e12, "optimizer": 1e12})
    optimizer = torch.optim.SGD(prepared.task.model.parameters())
    told = out_of_memory.reported_memory_errors(prepared, optimizer, Heart(), much)
    with pytest.raises(CannotRun, match="nothing grew beyond the prediction"), told:
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
