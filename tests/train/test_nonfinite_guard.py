"""A step whose loss or gradient is not finite leaves weights, moments and buffers as they were, to the bit."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW

from stoker.hardware.process_device import Device
from stoker.job.blocks.train_block import TrainBlock
from stoker.train.nonfinite_guard import NonfiniteGuard, StepNumbers
from stoker.train.optim.optimizer import build_optimizer
from stoker.train.single_process import SingleProcess
from stoker.train.step import is_wrong

BLOCK = {"lr": 0.1, "weight_decay": 0.1, "beta2": 0.99, "eps": 1e-8, "min_lr": 0.0}


class Trained:
    """A small network, its optimizer, and the guard of its steps."""

    def __init__(self, optimizer: str, *, on_host: bool = False, device: str = "cpu", fp16: bool = False) -> None:
        """``optimizer`` may be followed by the type of its states."""
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 64), nn.BatchNorm1d(64), nn.Linear(64, 3)).to(device)
        self.device = device
        name, _, states = optimizer.partition(" ")
        block = TrainBlock.model_validate({"optimizer": name, "optimizer_states": states or "fp32", **BLOCK})
        self.optimizer = build_optimizer(self.model, block, on_host=on_host)
        self.scaler = torch.amp.GradScaler(device, enabled=fp16, init_scale=64.0)
        self.engine: Any = SingleProcess(None, Device(device, "fp32", ""), list(self.model.parameters()))  # type: ignore[arg-type]
        self.guard = NonfiniteGuard(self.optimizer, self.scaler, self.engine, lambda: list(self.model.buffers()))

    def step(self, spoil_loss: float = 1.0, spoil_gradient: float = 1.0, inputs: float = 1.0) -> StepNumbers:
        self.optimizer.zero_grad(set_to_none=True)
        self.guard.begin()
        given = torch.randn(5, 6, generator=torch.Generator().manual_seed(1)).to(self.device) * inputs
        loss = self.model(given).square().sum()
        self.scaler.scale(loss).backward()
        self.model[2].bias.grad[1] *= spoil_gradient
        self.scaler.unscale_(self.optimizer)
        norm = self.engine.clip(1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = 0.1
        return self.guard.step(loss.detach().double() * spoil_loss, norm, asked=False)

    def state(self) -> list[Tensor]:
        moments = [v for p in self.model.parameters() for v in self.optimizer.state[p].values() if torch.is_tensor(v)]
        return [t.detach().clone() for t in (*self.model.state_dict().values(), *moments)]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


LOW = ["adamw bf16", "adamw 8bit"]
OPTIMIZERS = [
    ("adamw", False), ("adafactor", False), ("sgd", False), ("adamw", True), *((name, False) for name in LOW)
]  # fmt: skip


@pytest.mark.parametrize(("optimizer", "on_host"), OPTIMIZERS)
@pytest.mark.parametrize(
    "spoilt",
    [{"spoil_loss": math.nan}, {"spoil_loss": math.inf}, {"spoil_gradient": math.inf}, {"inputs": math.nan}],
    ids=str,
)
def test_a_step_is_left_out_without_a_trace(optimizer: str, on_host: bool, spoilt: dict[str, float]) -> None:
    one, other = Trained(optimizer, on_host=on_host), Trained(optimizer, on_host=on_host)
    assert one.step().taken and other.step().taken
    before = one.state()
    found = one.step(**spoilt)
    assert not found.taken and math.isfinite(found.loss) == ("spoil_gradient" in spoilt)
    assert same(one.state(), before)
    assert one.step().taken and other.step().taken
    assert same(one.state(), other.state()) and not same(one.state(), before)


def test_the_numbers_are_those_of_the_step() -> None:
    trained = Trained("adamw")
    found = trained.step()
    again = Trained("adamw")
    loss = again.model(torch.randn(5, 6, generator=torch.Generator().manual_seed(1))).square().sum()
    loss.backward()
    loss = loss.detach()
    norm = torch.nn.utils.get_total_norm([p.grad for p in again.model.parameters() if p.grad is not None])
    assert found.loss == float(loss) and found.grad_norm == float(norm) and not found.asked


def test_the_loss_scale_shrinks_by_an_overflow_and_grows_without() -> None:
    trained = Trained("adamw", fp16=True)
    assert trained.step().taken
    found = trained.step(spoil_gradient=math.inf)
    assert not found.taken and math.isfinite(found.loss)
    assert trained.scaler.get_scale() == 32.0 and trained.step().taken and trained.scaler.get_scale() == 32.0
    assert not trained.step(spoil_loss=math.inf).taken and trained.scaler.get_scale() == 16.0


def test_only_an_overflow_that_a_smaller_scale_can_avoid_is_none_of_the_samples() -> None:
    def of(loss: float, scale: float | None, *, taken: bool = False) -> bool:
        scaler = torch.amp.GradScaler("cpu", enabled=scale is not None, init_scale=scale or 1.0)
        scaler.scale(torch.ones(1))  # its scale is made with the first use
        return is_wrong(StepNumbers(loss, math.inf, taken, False, ()), scaler)

    assert not of(1.0, 1.0) and not of(1.0, 2.0**16)
    assert of(1.0, 0.5) and of(1.0, None)
    assert of(math.inf, 2.0**16) and of(math.nan, 1.0)
    assert not of(1.0, None, taken=True) and not of(1.0, 0.5, taken=True)


def test_parameters_on_another_device_than_the_loss_take_no_flag() -> None:
    """The host would read the flag before the device has written it."""
    flagged: list[bool] = []

    class Recorded(AdamW):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            flagged.append(hasattr(self, "found_inf"))

    for device in ("cpu", "meta"):
        optimizer = Recorded([nn.Parameter(torch.zeros(2))], fused=True)
        optimizer.param_groups[0]["params"] = [nn.Parameter(torch.zeros(2, device=device))]
        guard = NonfiniteGuard(optimizer, torch.amp.GradScaler(enabled=False), Trained("sgd").engine, list)
        for norm in (1.0, math.inf):
            guard.step(torch.tensor(1.0), torch.tensor(norm), asked=False)
    assert flagged == [True, True, False]  # without a flag, a step that is not finite is not taken


@pytest.mark.parametrize("optimizer", ["adamw", *LOW])
def test_a_step_is_launched_before_the_numbers_are_read(optimizer: str) -> None:
    trained, plain = Trained(optimizer), Trained(optimizer)
    done: list[str] = []
    launch, read = type(trained.optimizer).step, Tensor.tolist
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(trained.optimizer), "step", lambda self: (launch(self), done.append("step"))[0])
        patch.setattr(Tensor, "tolist", lambda self: (done.append("read"), read(self))[1])
        trained.step()
    assert done == ["step", "read"]
    plain.guard._takes_flag = False
    plain.step()
    assert same(trained.state(), plain.state())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("fp16", [False, True])
@pytest.mark.parametrize("optimizer", ["adamw", *LOW])
def test_a_gpu_is_waited_for_once_a_step_and_after_the_step_was_launched(optimizer: str, fp16: bool) -> None:
    trained = Trained(optimizer, device="cuda", fp16=fp16)
    trained.step()
    before = trained.state()
    taken: list[str] = []
    launch = type(trained.optimizer).step

    def step(optimizer: Any, *arguments: Any) -> None:
        launch(optimizer, *arguments)
        taken.append("launched")
        torch.cuda.set_sync_debug_mode("default")

    trained.optimizer.step = step.__get__(trained.optimizer)  # type: ignore[method-assign]
    loss = trained.model(torch.randn(5, 6, device="cuda")).square().sum()
    trained.optimizer.zero_grad(set_to_none=True)
    trained.guard.begin()
    trained.scaler.scale(loss).backward()
    torch.cuda.set_sync_debug_mode("error")  # from here to the launch nothing may wait for the device
    try:
        trained.scaler.unscale_(trained.optimizer)
        norm = trained.engine.clip(1.0)
        found = trained.guard.step(loss.detach().double() * math.nan, norm, asked=False)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert taken == ["launched"] and not found.taken and same(trained.state(), before)
