"""Arithmetic without float32: what stays in float64, and that models agree to the last digits in it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from stoker.parallel.float64_mode import in_float64
from stoker.verify.toy_config import ToyShape, shrunk
from stoker.verify.toy_model import WEIGHT_SCALE

FAMILIES = (  # noqa: SIM905
    "gpt2 bloom opt gpt_neo gptj gpt_neox falcon llama qwen2 qwen3 mistral gemma2 gemma3_text glm glm4 phi phi3 "
    "cohere granite mixtral qwen2_moe qwen3_moe gpt_oss"
).split()


@pytest.mark.parametrize(
    "ask",
    [
        lambda x: x.float(),
        lambda x: x.to(torch.float32),
        lambda x: x.to("cpu", torch.float32),
        lambda x: x.to(dtype=torch.float),
        lambda x: x.type(torch.float32),
        lambda x: F.softmax(x, dim=-1, dtype=torch.float32),
        lambda x: x.softmax(-1, torch.float32),
        lambda x: x.sum(dtype=torch.float32),
        lambda x: torch.zeros(2, dtype=torch.float32),
        lambda x: torch.arange(4).float(),
        lambda x: torch.ones(2),
    ],
)
def test_float32_is_never_made(ask: Callable[[Tensor], Tensor]) -> None:
    x = torch.ones(2, 3, dtype=torch.float64)
    with in_float64():
        assert ask(x).dtype == torch.float64
    assert torch.get_default_dtype() == torch.float32
    assert ask(x).dtype == torch.float32


def test_stored_bits_are_read_as_what_they_are() -> None:
    stored = torch.tensor([1.5, -2.0], dtype=torch.float32)
    with in_float64():
        read = torch.frombuffer(bytearray(stored.numpy().tobytes()), dtype=torch.float32)
        assert torch.equal(read, stored) and torch.equal(stored.view(torch.uint8).view(torch.float32), stored)
        assert read.float().dtype == torch.float64


def test_the_backward_pass_is_float64_too() -> None:
    """As recompute needs, which runs a block's forward pass again there."""
    x = torch.tensor(1 / 3, dtype=torch.float64, requires_grad=True)
    with in_float64():
        y = torch.utils.checkpoint.checkpoint(lambda x: x.float() ** 3, x, use_reentrant=False)
        y.backward()
    assert x.grad is not None and float(x.grad) == pytest.approx(1 / 3, rel=1e-15)


def test_grouped_products_are_those_of_float32() -> None:
    x, weights = torch.randn(10, 16), torch.randn(3, 16, 8)
    ends = torch.tensor([4, 4, 10], dtype=torch.int32)
    expected = F.grouped_mm(x, weights, offs=ends)
    with in_float64():
        exact = F.grouped_mm(x.double(), weights.double(), offs=ends)
    assert exact.dtype == torch.float64
    torch.testing.assert_close(exact.to(torch.float32), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_and_its_halves_agree(family: str) -> None:
    """Rounding to float32 anywhere would show: halves are added up in another order."""
    torch.manual_seed(0)
    with in_float64():
        model = AutoModelForCausalLM.from_config(shrunk(AutoConfig.for_model(family), ToyShape())).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.dtype == torch.float64
            if parameter.dim() > 1:
                parameter.normal_(std=WEIGHT_SCALE)
    ids = torch.randint(0, 131, (6, 20))
    with in_float64():
        whole = model(input_ids=ids, use_cache=False).logits
        grads = torch.autograd.grad(whole.square().mean(), list(model.parameters()), allow_unused=True)
        halves = [model(input_ids=half, use_cache=False).logits for half in ids.split(3)]
        sums = [h.square().sum() / whole.numel() for h in halves]
        apart = [torch.autograd.grad(s, list(model.parameters()), allow_unused=True) for s in sums]
    scale = float(whole.detach().abs().max())
    assert float((torch.cat(halves) - whole).detach().abs().max()) < 1e-12 * scale
    for (name, _), g, a, b in zip(model.named_parameters(), grads, *apart, strict=True):
        if g is not None and a is not None and b is not None:  # an expert that no token chose has none
            torch.testing.assert_close(a + b, g, rtol=1e-10, atol=1e-12 * max(1.0, float(g.abs().max())), msg=name)
    if "moe" not in family and family not in ("mixtral", "gpt_oss"):  # whose plain products exist in no float64
        with torch.no_grad():
            plain = model(input_ids=ids, use_cache=False).logits
        assert float((plain - whole).detach().abs().max()) < 1e-4 * scale
