"""The optimizer on the host: no bucket is stepped before its gradients have come, and copies run beside the steps."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from late_copies import LateCopies
from torch import nn
from torch.optim import AdamW

from stoker.parallel.offload.host_optimizer import Groups, HostOptimizer

SIZES = (5, 3, 7, 2)
STEPS = 3


def parameters() -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(size, 4)) for size in SIZES]


def steps(optimizer: torch.optim.Optimizer, weights: list[nn.Parameter]) -> None:
    generator = torch.Generator().manual_seed(1)
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)
        for number, weight in enumerate(weights):
            weight.grad = None if step == number == 1 else torch.randn(weight.shape, generator=generator)
        optimizer.step()


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is copied when, with a bucket for each parameter, and the host's steps between."""
    monkeypatch.setattr("stoker.parallel.offload.host_optimizer.BUCKET_BYTES", 1)
    return []


def host_optimizer(weights: list[nn.Parameter], log: list[str]) -> HostOptimizer:
    class Logged(AdamW):
        def step(self, closure: object = None) -> None:  # type: ignore[override]
            log.append("steps")
            super().step()

    def make(groups: Groups) -> AdamW:
        return Logged(groups, lr=0.1, fused=True)

    ways = iter(("down", "up"))
    return HostOptimizer([{"params": weights, "weight_decay": 0.0}], make, lambda _: LateCopies(log, next(ways)))


def test_steps_are_those_on_the_device_however_late_copies_are(log: list[str]) -> None:
    mine, plain = parameters(), parameters()
    steps(host_optimizer(mine, log), mine)
    steps(AdamW(plain, lr=0.1, weight_decay=0.0, fused=True), plain)
    for one, other in zip(mine, plain, strict=True):
        assert torch.equal(one, other)


def test_all_gradients_are_on_their_way_before_the_first_step_and_weights_go_back_before_the_next(
    log: list[str],
) -> None:
    mine = parameters()
    steps(host_optimizer(mine, log), mine)
    bucket = ["down waits", "steps", "up begins"]
    assert log[: 4 + 4 * 3] == ["down begins"] * 4 + bucket * 4


def test_buckets_are_filled_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker.parallel.offload.host_optimizer.BUCKET_BYTES", 6 * 4 * 4)
    log: list[str] = []
    mine, plain = parameters(), parameters()
    steps(host_optimizer(mine, log), mine)
    steps(AdamW(plain, lr=0.1, weight_decay=0.0, fused=True), plain)
    assert log[:4] == [*["down begins"] * 3, "down waits"]  # of 5 + 3 rows, of 7, and of the rest
    assert all(torch.equal(one, other) for one, other in zip(mine, plain, strict=True))


def test_without_streams_copies_are_made_at_once() -> None:
    mine, plain = parameters(), parameters()
    steps(HostOptimizer([{"params": mine, "weight_decay": 0.0}], partial(AdamW, lr=0.1, fused=True)), mine)
    steps(AdamW(plain, lr=0.1, weight_decay=0.0, fused=True), plain)
    assert all(torch.equal(one, other) for one, other in zip(mine, plain, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("least", [0, 1 << 30])  # bytes of what is page-locked afterwards
def test_copies_on_streams_of_a_gpu(least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker.parallel.offload.page_locked.LEAST_BYTES", least)
    monkeypatch.setattr("stoker.parallel.offload.host_optimizer.BUCKET_BYTES", 1 << 20)
    torch.manual_seed(0)
    mine = [nn.Parameter(torch.randn(1 << 10, 1 << 10, device="cuda")) for _ in range(8)]
    plain = [nn.Parameter(p.detach().cpu()) for p in mine]
    host, device = (
        HostOptimizer([{"params": mine, "weight_decay": 0.0, "lr": 0.1}], partial(AdamW, fused=True)),
        AdamW(plain, 0.1, weight_decay=0.0, fused=True),
    )
    for step in range(STEPS):
        for one, other in zip(mine, plain, strict=True):
            one.grad = one.detach().sin() * (step + 1)  # of weights that may still be on their way
            other.grad = one.grad.cpu()
        host.step()
        device.step()
    for one, other in zip(mine, plain, strict=True):
        assert torch.equal(one.cpu(), other)
