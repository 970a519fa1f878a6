"""The compiled step of AdamW with low-precision moments gives the numbers of the eager one, by one compilation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from stoker.train.optim import fused_adamw_step, low_precision_adamw
from stoker.train.optim.bf16_states import Bf16Moments
from stoker.train.optim.eight_bit_states import EightBitMoments
from stoker.train.optim.held_moments import HeldMoments
from stoker.train.optim.low_precision_adamw import LowPrecisionAdamW

FORMATS = {"bf16": Bf16Moments(), "8bit": EightBitMoments()}
SHAPES = [(48, 128), (20, 64), (33,), (7, 1920), (40, 40)]  # the third is stepped eagerly, the last has no whole blocks
VERSIONS = {"bf16": 1, "8bit": 2}  # blocks of 8 bits, and moments of matrices without whole blocks


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The backend that counts compilations. Steps on this device are compiled if the fixture is used."""
    torch._dynamo.reset()
    backend = CompileCounterWithBackend("aot_eager")
    function = torch.compile(fused_adamw_step.step_of_rows, fullgraph=True, backend=backend)
    monkeypatch.setattr(fused_adamw_step, "_compiled", lambda: function)
    monkeypatch.setattr(fused_adamw_step, "LEAST", 64)
    return backend


def trained(moments: HeldMoments, steps: int = 6) -> list[torch.Tensor]:
    """Weights and moments after steps with changing learning rates, one of which is left out."""
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
    groups = [{"params": parameters[:2], "weight_decay": 0.1}, {"params": parameters[2:], "weight_decay": 0.0}]
    optimizer = LowPrecisionAdamW(groups, moments, lr=0.1, betas=(0.9, 0.99), eps=1e-8)
    for step in range(steps):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator) * 10.0 ** (step % 3)
        bad = step == 3
        if bad:
            parameters[0].grad[0, 0] = torch.inf  # type: ignore[index]
        optimizer.found_inf = torch.tensor(float(bad))  # type: ignore[attr-defined]
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (step + 1)
        optimizer.step()
        if bad:
            optimizer.count_back()
    states = [optimizer.state[parameter] for parameter in parameters]
    return [p.detach() for p in parameters] + [state[name] for state in states for name in sorted(state)]


@pytest.mark.parametrize("name", FORMATS)
def test_steps_are_those_of_the_eager_code(name: str, compiled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    eager = trained(FORMATS[name])
    assert not compiled.frame_count
    monkeypatch.setattr(fused_adamw_step, "compiles_steps", lambda kind: True)
    monkeypatch.setattr(low_precision_adamw, "AT_ONCE", 4096)  # pieces of several sizes
    found = trained(FORMATS[name])
    assert compiled.frame_count == VERSIONS[name]
    monkeypatch.setattr(fused_adamw_step, "compiles_steps", lambda kind: False)
    expected = eager if name == "8bit" else trained(FORMATS[name])  # random bits depend on the sizes of pieces
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        if one.dtype == torch.uint8:  # a number in the middle of two values of the codebook goes to either
            assert (one != other).float().mean() < 1e-3
        else:
            differ = ~torch.isclose(one.double(), other.double(), rtol=1e-5, atol=1e-6)
            assert differ.float().mean() < 1e-3  # rounded the other way, at most by one unit in the last place
            torch.testing.assert_close(one.double(), other.double(), rtol=1e-2, atol=1e-2)


def test_stochastic_rounding_is_the_same_to_the_bit() -> None:
    generator = torch.Generator().manual_seed(0)
    exact = {name: torch.randn(4096, generator=generator) ** 5 for name in ("exp_avg", "exp_avg_sq")}
    noise = torch.randint(1 << 16, (2, 4096), generator=generator, dtype=torch.int32)
    moments = Bf16Moments()

    def stored(write: Any) -> list[torch.Tensor]:
        held = {name: torch.zeros(64, 64, dtype=torch.bfloat16) for name in exact}
        write([held], {name: x.clone() for name, x in exact.items()}, noise, None, {})
        return list(held.values())

    torch._dynamo.reset()
    compiled = torch.compile(moments.write, fullgraph=True, backend="aot_eager")
    for one, other in zip(stored(compiled), stored(moments.write), strict=True):
        assert torch.equal(one, other) and len(one.unique()) > 1000


def test_pieces_that_do_not_fit_are_stepped_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    size = fused_adamw_step.LEAST
    whole = torch.zeros(size // 64, 64)
    held = {"exp_avg": torch.zeros_like(whole)}
    assert not fused_adamw_step.fits(whole, held)  # on a CPU
    monkeypatch.setattr(fused_adamw_step, "compiles_steps", lambda kind: True)
    assert fused_adamw_step.fits(whole, held)
    for other in (whole[1:], whole.double(), whole.T, torch.zeros(size + 1)):
        assert not fused_adamw_step.fits(other, held)
    assert not fused_adamw_step.fits(whole, {"exp_avg": whole.T})
