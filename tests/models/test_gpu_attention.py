"""On a GPU: attention of whole rows gives the gradients of the CPU, and by the kernels that are meant."""

from __future__ import annotations

import copy

import pytest
import torch
from test_packed_attention import PADDED, attending
from torch import nn
from torch.profiler import ProfilerActivity, profile

from families import SHAPES, tiny
from stoker.models import packed_row
from stoker.models.collate import Row
from stoker.models.language_model import lay_out_for

pytestmark = pytest.mark.gpu


def gradients(model: nn.Module, rows: list[Row], device: str, precision: torch.dtype) -> list[torch.Tensor]:
    """The gradients of the rows' summed loss on a device under autocast, as float32 on the CPU."""
    model = attending(copy.deepcopy(model).to(device).eval())  # type: ignore[arg-type]
    language = lay_out_for(model)
    low = precision != torch.float32
    for inputs in language.lay_out(rows, torch.device(device)):
        with packed_row.row_of(inputs), torch.autocast(device, precision if low else torch.bfloat16, enabled=low):
            language.loss(inputs)[0].backward()
    return [p.grad.float().cpu() for p in model.parameters() if p.grad is not None]


def distance(given: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """Relative to the largest gradient."""
    largest = max(float(e.norm()) for e in expected)
    return max(float((g - e).norm()) for g, e in zip(given, expected, strict=True)) / largest


@pytest.mark.parametrize("family", sorted(set(SHAPES) - PADDED))
def test_gradients_are_those_of_the_cpu(family: str, documents: list[Row]) -> None:
    model = tiny(family, dtype=torch.float32)
    exact = gradients(model, documents, "cpu", torch.float32)
    assert distance(gradients(model, documents, "cuda", torch.float32), exact) < 1e-3
    rounded = distance(gradients(model, documents, "cpu", torch.bfloat16), exact)
    assert distance(gradients(model, documents, "cuda", torch.bfloat16), exact) < 2 * rounded + 1e-3


def test_a_layer_is_one_flash_call_and_no_score_is_written(documents: list[Row]) -> None:
    model = tiny("llama", dtype=torch.float32)
    gradients(model, documents, "cuda", torch.bfloat16)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        gradients(model, documents, "cuda", torch.bfloat16)
    calls = {event.key: event.count for event in profiled.key_averages()}
    assert calls.get("aten::_flash_attention_forward") == model.config.num_hidden_layers
    assert not [name for name in calls if "attention_math" in name]


def test_compiled_blocks_have_one_graph(documents: list[Row]) -> None:
    model = tiny("llama", dtype=torch.float32).cuda().eval()
    language = lay_out_for(model)
    plain = copy.deepcopy(language)
    for block in model.model.layers:
        block.forward = torch.compile(block.forward, fullgraph=True)
    for rows in (documents[:2], documents, documents[::-1]):
        (inputs,) = language.lay_out(rows, torch.device("cuda"))
        with packed_row.row_of(inputs), torch.autocast("cuda", torch.bfloat16):
            given, expected = language.loss(inputs)[0], plain.loss(inputs)[0]
        torch.testing.assert_close(given, expected, rtol=0.02, atol=0.0)
        given.backward()
