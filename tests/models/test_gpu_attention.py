"""On a GPU: attention of whole rows gives the gradients of the CPU, and by the kernels that are meant."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from test_packed_attention import PADDED, attending
from torch import nn
from torch.nn.attention import restore_flash_attention_impl
from torch.profiler import ProfilerActivity, profile

from families import SHAPES, VOCABULARY, tiny
from stoker.models.attention import linear_kernels, packed_row
from stoker.models.attention.attention_kernels import FASTER_FROM, choose_kernels, heads_of
from stoker.models.attention.collate import Row
from stoker.models.attention.even_rows import even_rows
from stoker.models.language_model import LanguageModel, lay_out_for

pytestmark = pytest.mark.gpu
LINEAR = ("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next")


def on_device(model: nn.Module, device: str, precision: torch.dtype) -> tuple[LanguageModel, torch.autocast]:
    """A copy of the model on a device, laid out there, and the autocast of its passes."""
    low = precision != torch.float32
    autocast = torch.autocast(device, precision if low else torch.bfloat16, enabled=low)
    with autocast:
        return lay_out_for(attending(copy.deepcopy(model).to(device).eval())), autocast  # type: ignore[arg-type]


def gradients(language: LanguageModel, autocast: torch.autocast, rows: list[Row]) -> list[torch.Tensor]:
    """The gradients of the rows' summed loss, as float32 on the CPU."""
    assert language.packs
    language.model.zero_grad()
    for inputs in language.lay_out(rows, language.model.device):
        with packed_row.row_of(inputs), autocast:
            language.loss(inputs)[0].backward()
    return [p.grad.float().cpu() for p in language.model.parameters() if p.grad is not None]


def distance(given: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """Relative to the largest gradient."""
    largest = max(float(e.norm()) for e in expected)
    return max(float((g - e).norm()) for g, e in zip(given, expected, strict=True)) / largest


@pytest.mark.parametrize("family", sorted(set(SHAPES) - PADDED - {*LINEAR}))
def test_gradients_are_those_of_the_cpu(family: str, documents: list[Row]) -> None:
    model = tiny(family, dtype=torch.float32)
    exact = gradients(*on_device(model, "cpu", torch.float32), documents)
    assert distance(gradients(*on_device(model, "cuda", torch.float32), documents), exact) < 1e-3
    rounded = distance(gradients(*on_device(model, "cpu", torch.bfloat16), documents), exact)
    assert distance(gradients(*on_device(model, "cuda", torch.bfloat16), documents), exact) < 2 * rounded + 1e-3


@pytest.mark.parametrize("family", LINEAR)
@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "torch"])
def test_gradients_of_linear_attention_are_those_of_the_cpu(
    family: str, kernels: bool, documents: list[Row], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With heads of the sizes that its kernels take, whose products of float32 numbers are rounded to 10 bits."""
    if kernels and not linear_kernels.has_kernels():
        pytest.skip("flash-linear-attention is not installed")
    if not kernels:
        monkeypatch.setattr(linear_kernels, "has_kernels", lambda: False)
    sizes = {"linear_key_head_dim": 32, "linear_value_head_dim": 32}
    model = tiny(family, dtype=torch.float32, **sizes)
    exact = gradients(*on_device(model, "cpu", torch.float32), documents)
    found = gradients(*on_device(model, "cuda", torch.float32), documents)
    assert distance(found, exact) < (1e-2 if kernels else 1e-3)
    rounded = distance(gradients(*on_device(model, "cpu", torch.bfloat16), documents), exact)
    assert distance(gradients(*on_device(model, "cuda", torch.bfloat16), documents), exact) < 2 * rounded + 1e-3


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "llama"])
def test_gradients_of_flex_attention_are_those_of_the_cpu(family: str) -> None:
    """Heads of the sizes that its kernel takes, and rows that are shorter and longer than its blocks of 128."""
    sizes = {"hidden_size": 128} if family == "llama" else {"head_dim": 32}
    model = tiny(family, dtype=torch.float32, **sizes)
    on_cpu, on_gpu = (on_device(model, device, torch.float32) for device in ("cpu", "cuda"))
    generator = np.random.default_rng(0)
    for lengths in ((40, 31), (130, 70, 9)):
        rows = [(generator.integers(2, VOCABULARY, n).astype(np.uint32), np.ones(n, bool)) for n in lengths]
        assert distance(gradients(*on_gpu, rows), gradients(*on_cpu, rows)) < 1e-3


def test_a_layer_is_one_flash_call_and_no_score_is_written(documents: list[Row]) -> None:
    model = tiny("llama", dtype=torch.float32)
    laid_out = on_device(model, "cuda", torch.bfloat16)
    gradients(*laid_out, documents)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        gradients(*laid_out, documents)
    calls = {event.key: event.count for event in profiled.key_averages()}
    assert calls.get("aten::_flash_attention_forward") == model.config.num_hidden_layers
    assert not [name for name in calls if "attention_math" in name]


def test_compiled_blocks_have_one_graph(documents: list[Row]) -> None:
    language, autocast = on_device(tiny("llama", dtype=torch.float32), "cuda", torch.bfloat16)
    plain = copy.deepcopy(language)
    for block in language.model.model.layers:
        block.forward = torch.compile(block.forward, fullgraph=True)
    for rows in (documents[:2], documents, documents[::-1]):
        (inputs,) = language.lay_out(rows, torch.device("cuda"))
        with packed_row.row_of(inputs), autocast:
            given, expected = language.loss(inputs)[0], plain.loss(inputs)[0]
        torch.testing.assert_close(given, expected, rtol=0.02, atol=0.0)
        given.backward()


def test_the_kernels_chosen_for_documents_of_one_length_give_the_gradients_of_the_cpu() -> None:
    generator = np.random.default_rng(0)
    rows = [(generator.integers(2, VOCABULARY, 129).astype(np.uint32), np.ones(129, bool)) for _ in range(4)]
    model = tiny("llama", dtype=torch.float32)
    heads = heads_of(model.config, 1)
    assert heads is not None
    exact = gradients(*on_device(model, "cpu", torch.float32), rows)
    rounded = distance(gradients(*on_device(model, "cpu", torch.bfloat16), rows), exact)
    found = choose_kernels(heads, 128, torch.bfloat16, torch.device("cuda", torch.cuda.current_device()))
    try:
        print(found)
        assert bool(found) == (torch.cuda.get_device_capability() >= FASTER_FROM)
        even_rows.enable()  # whether it is faster for such small documents or not
        assert distance(gradients(*on_device(model, "cuda", torch.bfloat16), rows), exact) < 2 * rounded + 1e-3
    finally:
        even_rows.disable()
        restore_flash_attention_impl(_raise_warn=False)
