"""The form of a model in training computes what transformers' own does."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.profiler import profile

from families import tiny
from stoker.models.families.gpt_neo import _mask
from stoker.models.prepare_architecture import training_form

IDS = torch.arange(2, 30)[None]


@pytest.mark.parametrize("family", ["gpt2", "gptj", "gpt_neo", "phi"])
def test_gelu_by_the_tanh_formula_is_one_operator(family: str) -> None:
    own = tiny(family)
    trained = copy.deepcopy(own)
    training_form(trained)
    with profile() as run:
        given = trained(input_ids=IDS, labels=IDS)
    counts = {event.key: event.count for event in run.key_averages()}
    assert counts.get("aten::gelu") == 2 and not counts.keys() & {"aten::pow", "aten::tanh"}

    expected = own(input_ids=IDS, labels=IDS)
    torch.testing.assert_close(given.logits, expected.logits, rtol=1e-12, atol=1e-12)
    expected.loss.backward()
    given.loss.backward()
    squares = [sum(float(p.grad.square().sum()) for p in m.parameters()) for m in (own, trained)]
    assert squares[0] == pytest.approx(squares[1], rel=1e-10)


def test_gpt_neo_builds_its_masks_for_a_pass_and_holds_none_of_its_context() -> None:
    own = tiny("gpt_neo")
    trained = copy.deepcopy(own)
    training_form(trained)
    for block, before in zip(trained.transformer.h, own.transformer.h, strict=True):  # type: ignore[union-attr, arg-type]
        attention = before.attn.attention
        assert block.attn.attention.bias.numel() == 0 < attention.bias.numel()
        size = attention.config.window_size if attention.attention_type == "local" else None
        keys = attention.bias.shape[-1]
        assert torch.equal(_mask(keys, keys, size, torch.device("cpu")), attention.bias)
        assert torch.equal(_mask(3, 20, size, torch.device("cpu")), attention.bias[:, :, 17:20, :20])
