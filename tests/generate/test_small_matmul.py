"""The product for few rows against torch's linear layer, and only where it is meant to be."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from stoker.generate.small_matmul import MOST, PACKED, BlockedWeights, plain_linears, product, small_matmuls


@pytest.mark.parametrize("rows", range(1, MOST + 1))
@pytest.mark.parametrize("bias", [True, False])
def test_the_product_is_that_of_a_linear_layer(rows: int, bias: bool) -> None:
    layer = nn.Linear(48, 33, bias=bias)
    x = torch.randn(rows, 48)
    expected = nn.functional.linear(x.double(), layer.weight.double(), layer.bias.double() if bias else None)
    found = product(x, layer.weight, layer.bias)
    assert found.is_contiguous()
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)


def test_layers_compute_as_before_after_the_block_and_with_more_rows_or_another_type() -> None:
    model = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 4)).eval()
    few, many = torch.randn(2, 3, 8), torch.randn(MOST + 1, 8)
    expected_few, expected_many = model(few), model(many)
    with small_matmuls(plain_linears(model)):
        assert "forward" in vars(model[0])
        torch.testing.assert_close(model(few), expected_few)
        assert torch.equal(model(many), expected_many)
        assert model.double()(few.double()).dtype == torch.float64
    assert "forward" not in vars(model[0])


def test_a_layer_whose_forward_was_replaced_keeps_it() -> None:
    layer = nn.Linear(4, 4)
    replaced = layer.forward = lambda x: x + 1  # type: ignore[method-assign]
    with small_matmuls([layer]):
        assert layer.forward is replaced
    assert layer.forward is replaced


def test_frozen_layers_keep_blocked_weights_from_a_few_tokens_on() -> None:
    model = nn.Sequential(nn.Linear(24, 20), nn.Linear(20, 8, bias=False)).eval()
    blocked = BlockedWeights(model)  # type: ignore[arg-type]
    with torch.inference_mode(), small_matmuls(model, blocked):  # type: ignore[arg-type]
        for rows in (1, 2, PACKED, 5, MOST, MOST + 1, 70):
            x = torch.randn(rows, 24)
            expected = model[1].weight @ (model[0].weight @ x.T + model[0].bias[:, None])
            torch.testing.assert_close(model(x), expected.T, rtol=1e-5, atol=1e-6)
            assert len(blocked._held) == (2 if rows >= PACKED else 0)


def test_blocked_weights_need_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = nn.Linear(24, 20)
    free = SimpleNamespace(available=3 * layer.weight.nbytes)
    monkeypatch.setattr("stoker.generate.small_matmul.psutil.virtual_memory", lambda: free)
    assert BlockedWeights([layer]).product(layer, torch.randn(4, 24)) is None
    free.available = 4 * layer.weight.nbytes
    assert BlockedWeights([layer]).product(layer, torch.randn(4, 24)) is not None


def test_blocked_weights_are_those_of_the_first_layers_and_are_freed_with_them() -> None:
    first, late = nn.Linear(24, 20), nn.Linear(24, 20)
    blocked = BlockedWeights([first])
    assert blocked.product(late, torch.randn(4, 24)) is None
    assert blocked.product(first, torch.randn(4, 24)) is not None and len(blocked._held) == 1
    del first
    gc.collect()
    assert not blocked._held
