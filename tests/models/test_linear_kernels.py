"""Linear attention by kernels that know documents, here with functions of the same contract in PyTorch."""

from __future__ import annotations

import copy
import sys
from functools import wraps
from inspect import unwrap
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig
from test_packed_attention import attending, farthest_gradient, laid_out_loss
from torch import Tensor, nn

from families import tiny
from stoker.hardware.process_device import Device
from stoker.job.layout import Layout
from stoker.launch.process_pool import Pool
from stoker.models.attention import linear_kernels, packed_row
from stoker.models.attention.collate import Row, pack
from stoker.models.families import FAMILIES
from stoker.models.language_model import lay_out_for
from stoker.models.prepare_architecture import training_form
from stoker.models.tuning.lora import fuse_lora
from stoker.parallel.mesh import Mesh
from stoker.parallel.tensor_parallel.tensor import split_tensors, take_positions
from stoker.train.language.place_model import describe_linear

LINEAR = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
RULE = "torch_chunk_gated_delta_rule"
CPU = torch.device("cpu")


def code_of(model: nn.Module) -> Any:
    """The module of transformers with the model's layers."""
    layer = next(layer for name, layer in model.named_modules() if name.endswith("linear_attn"))
    return sys.modules[type(layer).__module__]


def spans(bounds: Tensor, bounds_cpu: Tensor | None) -> list[tuple[int, int]]:
    assert bounds_cpu is not None and torch.equal(bounds, bounds_cpu)
    return list(pairwise(bounds.tolist()))


def convolution(
    x_1TC: Tensor,
    weight_CW: Tensor,
    bias: Tensor | None,
    *,
    activation: str,
    cu_seqlens: Tensor,
    cu_seqlens_cpu: Tensor,
) -> tuple[Tensor, None]:
    """As `causal_conv1d` of flash-linear-attention."""
    assert activation == "silu"
    channels, width = weight_CW.shape
    parts = []
    for start, end in spans(cu_seqlens, cu_seqlens_cpu):
        padded_1CT = F.pad(x_1TC[:, start:end].transpose(1, 2), (width - 1, 0))
        parts.append(F.silu(F.conv1d(padded_1CT, weight_CW[:, None], bias, groups=channels)).transpose(1, 2))
    return torch.cat(parts, dim=1), None


def rule_of(plain: Any, calls: list[int]) -> Any:
    """As `chunk_gated_delta_rule` of flash-linear-attention, where transformers has found that."""

    @wraps(plain)
    def rule(q: Tensor, k: Tensor, v: Tensor, *, g: Tensor, beta: Tensor, **options: Any) -> tuple[Tensor, Any]:
        bounds = options.pop("cu_seqlens", None)
        calls.append(0 if bounds is None else len(bounds) - 1)
        if bounds is None:
            out: tuple[Tensor, Any] = plain(q, k, v, g=g, beta=beta, **options)
            return out
        parts = [
            plain(*(x[:, start:end] for x in (q, k, v)), g=g[:, start:end], beta=beta[:, start:end], **options)[0]
            for start, end in spans(bounds, options.pop("cu_seqlens_cpu", None))
        ]
        return torch.cat(parts, dim=1), None

    return rule


def install(code: Any, patch: pytest.MonkeyPatch, *devices: str) -> list[int]:
    """Puts the functions in the place of the package's, for these devices; returns a list of the documents of each call
    of the rule."""
    calls: list[int] = []
    patch.setattr(linear_kernels, "DEVICES", devices)
    patch.setattr(linear_kernels, "has_kernels", lambda: True)
    patch.setitem(sys.modules, "fla.modules.conv", SimpleNamespace(causal_conv1d=convolution))
    for name in (*linear_kernels.RULES, *linear_kernels.CONVOLUTIONS):
        patch.setattr(code, name, unwrap(getattr(code, name)))
    patch.setattr(code, RULE, rule_of(getattr(code, RULE), calls))
    linear_kernels._choose_by_device.__wrapped__(code.__name__)
    return calls


@pytest.mark.parametrize("shared", [True, False], ids=["prefix", "apart"])
@pytest.mark.parametrize("family", LINEAR)
def test_one_call_for_all_documents_gives_the_gradients_of_the_documents(
    family: str, shared: bool, documents: list[Row], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not shared:
        for number, (ids, _) in enumerate(documents):
            ids[0] = 2 + number
    model = tiny(family, dtype=torch.float32).eval()
    expected, given = (lay_out_for(attending(each)) for each in (copy.deepcopy(model), model))
    total = laid_out_loss(expected, documents)
    calls = install(code_of(model), monkeypatch, "cpu")
    assert laid_out_loss(given, documents) == pytest.approx(total, rel=1e-6)
    assert farthest_gradient(given.model, expected.model) < 1e-5
    assert calls == [6 if shared else 5] * model.config.layer_types.count("linear_attention")


def test_a_cpu_and_float64_take_no_kernel(documents: list[Row], monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers would call the package wherever it can be imported."""
    model = tiny("qwen3_next", dtype=torch.float32).eval()
    language = lay_out_for(attending(model))
    calls = install(code_of(model), monkeypatch, "cuda")
    laid_out_loss(language, documents)
    model(torch.zeros(1, 9, dtype=torch.long))
    assert not calls
    monkeypatch.setattr(linear_kernels, "DEVICES", ("cpu",))
    laid_out_loss(lay_out_for(model.double()), documents)
    assert not calls
    model.float()(torch.zeros(1, 9, dtype=torch.long))
    assert calls == [0]  # as transformers calls it, in generation


def test_adapters_go_through_the_kernels(documents: list[Row], monkeypatch: pytest.MonkeyPatch) -> None:
    model = attending(tiny("qwen3_5_text", dtype=torch.float32))
    model.add_adapter(LoraConfig(r=2, target_modules=["in_proj_qkv", "in_proj_z", "out_proj"]))
    fuse_lora(model)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, std=0.2)
    language = lay_out_for(model.eval())
    laid_out_loss(language, documents)
    expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    assert len(expected) == 6
    calls = install(code_of(model), monkeypatch, "cpu")
    laid_out_loss(language, documents)
    assert calls == [6]
    for name, parameter in model.named_parameters():
        if name in expected:
            torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-4, atol=1e-5)


def under_tensor(family: str, kernels: bool) -> tuple[list[Tensor], list[int]]:
    """Hidden states, and the gradients of linear attention, on this process of two."""
    model = tiny(family, dtype=torch.float32).eval()
    training_form(model)
    lay_out_for(model)
    calls: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        if kernels:
            calls = install(code_of(model), patch, "cpu")
        mesh = Mesh(Layout(tensor=2), CPU)
        rows = [(np.arange(2, 2 + n), np.ones(n, bool)) for n in (9, 20, 3)]
        row = pack(rows, CPU, share=False)
        split_tensors(model, FAMILIES[family], mesh)
        embedded = take_positions(model.get_input_embeddings()(row.ids), mesh)
        with packed_row.segments(row.segments):
            out = model.base_model(inputs_embeds=embedded, position_ids=row.positions, use_cache=False)[0]
            out.square().sum().backward()
    gradients = [p.grad for name, p in model.named_parameters() if "linear_attn" in name]
    return [out.detach(), *gradients], calls


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_text"])
def test_tensor_processes_call_the_kernels_for_their_heads(pool: Pool, family: str) -> None:
    plain = pool.run(under_tensor, family, False, world=2)
    given = pool.run(under_tensor, family, True, world=2)
    for (expected, _), (found, calls) in zip(plain, given, strict=True):
        assert calls == [3]
        largest = max(float(x.norm()) for x in expected)
        assert max(float((x - y).norm()) for x, y in zip(found, expected, strict=True)) < 1e-5 * largest


def test_a_run_says_which_code_computes_linear_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device("cpu", "fp32", "a test")
    model, without, chunked = tiny("qwen3_next"), tiny("llama"), tiny("llama4_text")
    assert describe_linear(model, device) == ""
    monkeypatch.setattr(linear_kernels, "DEVICES", ("cpu",))
    monkeypatch.setattr(linear_kernels, "has_kernels", lambda: False)
    assert describe_linear(model, device).endswith("slow on a GPU: pip install 'stoker[linear]'")
    assert describe_linear(without, device) == "" and describe_linear(chunked, device) == ""
    monkeypatch.setattr(linear_kernels, "has_kernels", lambda: True)
    assert describe_linear(model, device).startswith("flash-linear-attention")
