"""AdamW's moments in bfloat16: rounding without bias, steps near those in float32, alone and under layouts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from running import write_job
from torch import nn

from launches import Launches
from stoker.job.blocks.train_block import TrainBlock
from stoker.runs.run_folder import RunFolder
from stoker.train.optim.bf16_states import Bf16Moments, stochastically_rounded
from stoker.train.optim.low_precision_adamw import LowPrecisionAdamW, Noise
from stoker.train.optim.optimizer import build_optimizer

pytestmark = pytest.mark.usefixtures("warm_processes")

DRAWS = 40_000


def trained(states: str, gradient: float, steps: int) -> tuple[nn.Parameter, torch.Tensor]:
    """A parameter after steps with one gradient, and its second moment."""
    model = nn.Linear(64, 1, bias=False)
    nn.init.zeros_(model.weight)
    given = {"lr": 1e-3, "weight_decay": 0.0, "beta2": 0.999, "eps": 1e-8, "optimizer_states": states}
    optimizer = build_optimizer(model, TrainBlock.model_validate(given))  # type: ignore[arg-type]
    for _ in range(steps):
        model.weight.grad = torch.full_like(model.weight, gradient)
        optimizer.step()
    return model.weight, optimizer.state[model.weight]["exp_avg_sq"]


@pytest.mark.parametrize("value", [1.001, -3.1415926, 1e-12, 65504.7])
def test_the_mean_of_many_roundings_is_the_number(value: float) -> None:
    x = torch.full((DRAWS,), value)
    rounded = stochastically_rounded(x.clone(), Noise(0, x.device).of([DRAWS])[0])
    assert rounded.dtype == torch.bfloat16
    found = rounded.double()
    assert len(found.unique()) == 2
    step = float(found.max() - found.min())
    assert found.min() <= x[0].double() <= found.max()
    assert float(found.mean()) == pytest.approx(float(x[0].double()), abs=4 * step / DRAWS**0.5)


@pytest.mark.parametrize("value", [0.0, 1.0, -0.5, 3.0e38])
def test_numbers_of_bfloat16_stay(value: float) -> None:
    x = torch.full((1000,), value).to(torch.bfloat16)
    assert torch.equal(stochastically_rounded(x.float(), Noise(0, x.device).of([1000])[0]), x)


def test_a_second_moment_that_changes_little_changes_nevertheless() -> None:
    """By rounding to the nearest it would end where a thousandth of the gap is less than half of the last bit."""
    plain, moment = trained("fp32", 0.1, 3000)
    weight, rounded = trained("bf16", 0.1, 3000)
    assert rounded.dtype == torch.bfloat16
    assert float(rounded.double().mean()) == pytest.approx(float(moment.mean()), rel=0.01)
    torch.testing.assert_close(weight, plain, rtol=0.05, atol=0)


def test_a_parameter_rounds_alike_beside_others() -> None:
    """Tied embeddings on the first and on the last stage of a pipeline, norms beside uneven pieces."""
    gradients = torch.randn(4, 30, 8, generator=torch.Generator().manual_seed(0))
    found = []
    for others in ([], [3], [40, 2]):
        parameters = [nn.Parameter(torch.ones(size, 8)) for size in (*others, 30)]
        optimizer = LowPrecisionAdamW([{"params": parameters}], Bf16Moments(), lr=0.1, betas=(0.9, 0.999), eps=1e-8)
        for gradient in gradients:
            for parameter in parameters:
                parameter.grad = gradient if parameter is parameters[-1] else torch.ones_like(parameter)
            optimizer.step()
        found.append(parameters[-1].detach())
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@pytest.mark.parametrize("states", ["bf16", "8bit"])
def test_parameters_are_stepped_together(states: str) -> None:
    model = nn.ModuleList([nn.Linear(64, 8) for _ in range(40)])
    given = {"lr": 1e-3, "weight_decay": 0.0, "beta2": 0.999, "eps": 1e-8, "optimizer_states": states}
    optimizer = build_optimizer(model, TrainBlock.model_validate(given))  # type: ignore[arg-type]
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    with Launches() as launches:
        optimizer.step()
    on_host = 2 * 40  # reads of step counters
    assert launches.count - on_host < 2 * 40


def test_a_parameter_in_another_order_of_memory_steps_like_any_other() -> None:
    found = []
    for transposed in (False, True):
        weights = torch.linspace(-1, 1, 64 * 8).view(8, 64)
        model = nn.Linear(64, 8, bias=False)
        model.weight = nn.Parameter(weights.T.contiguous().T if transposed else weights.clone())
        given = {"lr": 1e-1, "weight_decay": 0.1, "beta2": 0.999, "eps": 1e-8, "optimizer_states": "bf16"}
        optimizer = build_optimizer(model, TrainBlock.model_validate(given))  # type: ignore[arg-type]
        for _ in range(3):
            model.weight.grad = torch.empty_like(model.weight).copy_(weights.cos())
            optimizer.step()
        found.append(model.weight.detach())
    assert found[1].stride() == (1, 8) and torch.equal(found[0], found[1])


@pytest.mark.slow  # commands with processes of their own
def test_jobs_train_nearly_alike_and_go_on_to_the_bit(base: Path, sft: dict[str, Any]) -> None:
    constant = {**sft["train"], "schedule": "constant", "warmup": 0}  # whatever the number of steps
    job = str(write_job(base, {**sft, "tune": "full", "train": constant, "checkpoint": {"every": 4}}))
    bf16 = "train.optimizer_states=bf16"
    runs = {
        "plain": [],
        "one": [bf16],
        "parts": [bf16, "steps=7"],
        "shards": [bf16, "parallel.data=2", "parallel.shard=zero3"],
        "host": [bf16, "parallel.offload=optimizer"],
    }
    for name, keys in runs.items():
        train(base, job, f"output={name}", *keys)
    train(base, job, "output=parts", bf16)
    losses = {name: [line["loss"] for line in RunFolder(base / name).read_metrics()] for name in runs}
    assert losses["parts"] == losses["one"]
    for name in runs:
        assert losses[name] == pytest.approx(losses["plain"], rel=0.02), name


def train(base: Path, job: str, *keys: str) -> None:
    command = [sys.executable, "-m", "stoker", "train", job, *keys]
    done = subprocess.run(command, cwd=base, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
