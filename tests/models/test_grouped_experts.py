"""Experts' grouped products under autocast: 16 bits, as every other product."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from families import tiny
from stoker.models.language_model import lay_out_for


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_grouped_products_follow_autocast(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = tiny(family).float()
    lay_out_for(whole)
    product, types = nn.functional.grouped_mm, set[torch.dtype]()

    def watched(x: Tensor, weight: Tensor, **options: Tensor) -> Tensor:
        types.update((x.dtype, weight.dtype))
        return product(x, weight, **options)

    monkeypatch.setattr(nn.functional, "grouped_mm", watched)
    ids = torch.arange(5, 25)[None]

    def trained(experts: str, *, autocast: bool) -> tuple[float, list[Tensor]]:
        types.clear()
        model = copy.deepcopy(whole)
        model.set_experts_implementation(experts)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        gradients = [p.grad for name, p in model.named_parameters() if "experts." in name]
        return loss.item(), [gradient for gradient in gradients if gradient is not None]

    exact, _ = trained("grouped_mm", autocast=False)
    assert types == {torch.float32}
    grouped, gradients = trained("grouped_mm", autocast=True)
    assert types == {torch.bfloat16} and gradients and {g.dtype for g in gradients} == {torch.float32}
    assert grouped == pytest.approx(exact, rel=5e-3)
    one_by_one, expected = trained("eager", autocast=True)
    assert grouped == pytest.approx(one_by_one, rel=5e-3)
    for gradient, reference in zip(gradients, expected, strict=True):
        assert (gradient - reference).norm() <= 0.05 * reference.norm()
