"""Float8 products: what is rounded, which layers have them, and that jobs train with them under layouts."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchao.float8.float8_linear import Float8Linear
from torchao.float8.float8_training_tensor import LinearMMConfig

from stoker.errors import UserError
from stoker.models.split_fused import Parts
from stoker.parallel.float8 import float8_linears

CPU = torch.device("cpu")


class Model(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Module() for _ in range(2)])
        for layer in self.layers:
            layer.up = nn.Linear(width, 2 * width)
            layer.narrow = nn.Linear(2 * width, 10)
            layer.gate = nn.Linear(width, 16)  # a router
            layer.fused = Parts()
            layer.fused.add_module("gate", nn.Linear(width, 32))
        self.head = nn.Linear(width, 64)


def rounded(x: Tensor, kind: torch.dtype, dim: int | None) -> Tensor:
    """To float8 and back, with a scale for the tensor, or for each row: then a power of two."""
    most = torch.finfo(kind).max
    amax = x.abs().max() if dim is None else x.abs().amax(dim, keepdim=True)
    scale = (most / amax.double()).float()
    if dim is not None:
        scale = torch.exp2(torch.floor(torch.log2(scale)))
    return (x * scale).clamp(-most, most).to(kind).float() / scale


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_both_factors_of_every_product_are_rounded(recipe: str) -> None:
    model = Model()
    plain = copy.deepcopy(model.layers[0].up)
    float8_linears(model, recipe, CPU)  # type: ignore[arg-type]
    x = torch.randn(48, 32, requires_grad=True)
    y = model.layers[0].up(x)
    gradient = torch.randn_like(y)
    y.backward(gradient)

    small, wide = torch.float8_e4m3fn, torch.float8_e5m2 if recipe == "tensorwise" else torch.float8_e4m3fn
    rows, columns = (None, None) if recipe == "tensorwise" else (1, 0)
    weight, given = plain.weight.detach(), x.detach()
    y_expected = rounded(given, small, rows) @ rounded(weight, small, rows).T + plain.bias
    x_expected = rounded(gradient, wide, rows) @ rounded(weight, small, columns)
    w_expected = rounded(gradient, wide, columns).T @ rounded(given, small, columns)
    torch.testing.assert_close(y, y_expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(x.grad, x_expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(model.layers[0].up.weight.grad, w_expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(model.layers[0].up.bias.grad, gradient.sum(0))


def multiply_as_on_a_gpu(a: Tensor, b: Tensor, *, scale_a: Tensor, scale_b: Tensor, **how: Any) -> Tensor:
    """torch._scaled_mm with the sizes and strides that its CUDA kernels require."""
    assert a.shape[1] % 16 == 0 and b.shape[1] % 16 == 0
    assert a.stride(1) == b.stride(0) == 1
    return ((a.float() * scale_a) @ (b.float() * scale_b)).to(how["out_dtype"])


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_tokens_need_not_be_a_multiple_of_16(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "_scaled_mm", multiply_as_on_a_gpu)
    passes = []
    for emulate in (True, False):
        model = Model()
        float8_linears(model, recipe, CPU)  # type: ignore[arg-type]
        layer = model.layers[0].up
        assert isinstance(layer, Float8Linear)
        layer.linear_mm_config = LinearMMConfig(*(m._replace(emulate=emulate) for m in layer.linear_mm_config))
        x = torch.linspace(-1, 1, 109 * 32, dtype=torch.bfloat16).view(109, 32).requires_grad_()
        y = layer(x)
        y.square().sum().backward()
        passes.append((y, x.grad, layer.weight.grad))
    torch.testing.assert_close(passes[1], passes[0], rtol=1e-2, atol=1e-3)


def test_large_linear_layers_of_the_blocks_have_them_and_no_others() -> None:
    model = Model()
    parameters = dict(model.named_parameters())
    float8_linears(model, "tensorwise", CPU)
    changed = {name for name, module in model.named_modules() if type(module).__name__ == "Float8Linear"}
    assert changed == {f"layers.{i}.{name}" for i in range(2) for name in ("up", "fused.gate")}
    assert all(after is parameters[name] for name, after in model.named_parameters())


def test_a_model_without_such_layers_is_refused() -> None:
    with pytest.raises(UserError, match="multiples of 16"):
        float8_linears(Model(width=6), "rowwise", CPU)
