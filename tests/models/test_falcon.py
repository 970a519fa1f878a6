"""Falcon's attention by a fused kernel, against its own code."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from families import tiny
from stoker.models.families import falcon

FORMS: list[dict[str, Any]] = [
    {},
    {"alibi": True},
    {"num_kv_heads": 2, "new_decoder_architecture": True, "bias": True},
    {"multi_query": False, "parallel_attn": False},
]
ROWS, LENGTH = 2, 16


class Largest(TorchDispatchMode):
    """The most elements of a tensor that an operator returns."""

    elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        result = function(*arguments, **(options or {}))
        for each in result if isinstance(result, tuple) else (result,):
            if isinstance(each, torch.Tensor):
                self.elements = max(self.elements, each.untyped_storage().nbytes() // each.element_size())
        return result


@pytest.mark.parametrize("form", FORMS, ids=["", "alibi", "new", "all-heads"])
def test_outputs_gradients_and_cached_keys_are_those_of_its_own_code(form: dict[str, Any]) -> None:
    model = tiny("falcon", **form).double().eval()
    own = copy.deepcopy(model)
    falcon.attend(model)
    ids = torch.arange(ROWS * LENGTH).view(ROWS, LENGTH) % 20
    mask = torch.ones_like(ids)
    mask[1, -5:] = 0
    for each in (model, own):
        logits = each(input_ids=ids, attention_mask=mask, use_cache=False).logits[mask.bool()]
        logits.square().sum().backward()
    for got, expected in zip(model.parameters(), own.parameters(), strict=True):
        torch.testing.assert_close(got.grad, expected.grad, rtol=1e-10, atol=1e-10)
    caches = [each(input_ids=ids[:1], use_cache=True).past_key_values for each in (model, own)]
    assert caches[0].layers[0].keys.shape == caches[1].layers[0].keys.shape
    steps = [each(input_ids=ids[1:, :1], past_key_values=c) for each, c in zip((model, own), caches, strict=True)]
    torch.testing.assert_close(steps[0].logits, steps[1].logits, rtol=1e-10, atol=1e-10)


def test_no_scores_are_in_memory() -> None:
    length = 256
    model = tiny("falcon", max_position_embeddings=length).train()
    heads = model.config.num_attention_heads
    falcon.attend(model)
    with Largest() as largest:
        model.base_model(input_ids=torch.zeros(1, length, dtype=torch.long), use_cache=False)[0].sum().backward()
    assert largest.elements < heads * length**2 / 2
