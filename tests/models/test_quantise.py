"""Bases in fewer bits: every family trains on them, and plain peft on the same base answers as the trained model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from loading import load_model
from peft import PeftModel
from torch import Tensor, nn
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM

from families import tiny
from stoker.checkpoint.export.adapter_export import save_adapter
from stoker.errors import UserError
from stoker.hardware.process_device import choose_device
from stoker.job.blocks.model_block import ModelBlock
from stoker.job.layout import Layout
from stoker.job.load_job import load_job
from stoker.job.schema import Job
from stoker.models.attention import packed_row
from stoker.models.blocks import blocks_of
from stoker.models.build_model import build_model
from stoker.models.language_model import lay_out_for
from stoker.models.load_model import blank_model
from stoker.models.tuning import quantise
from stoker.models.tuning.adapters import unwrap
from stoker.models.tuning.quantise import (
    compute_exactly,
    device_for,
    packed_parameters,
    quantisation,
    quantised_copy,
    unpacked_numel,
)

FAMILIES = (
    "gpt2", "bloom", "opt", "gpt_neo", "gptj", "gpt_neox", "llama", "glm", "glm4", "qwen3", "mistral",
)  # fmt: skip
WIDTHS: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128}
OTHER_WIDTHS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 64},
    "gptj": {"n_embd": 64},
    "bloom": {"hidden_size": 64},
    "opt": {"hidden_size": 64, "ffn_dim": 96, "word_embed_proj_dim": 64},
    "gpt_neo": {"hidden_size": 64},
}
CPU = torch.device("cpu")
FORMS = ("4bit", "8bit", "int8", "int4")
CELLS = [
    (family, form)
    for family in FAMILIES
    for form in FORMS
    if (family, form) not in (("gpt2", "int8"), ("gpt2", "int4"))  # refused, see below
]


def written(family: str, folder: Path) -> Path:
    model = tiny(family, dtype=torch.float32, **OTHER_WIDTHS.get(family, WIDTHS))
    model.save_pretrained(folder / "m")
    return folder


def job(folder: Path, form: str) -> Job:
    lines = ["task: sft", f"model: {{name: m, quantise: {form}}}", "data: x.jsonl", "steps: 1"]
    lines.append("tune: {method: lora, rank: 4}")
    (folder / "job.yaml").write_text("\n".join(lines) + "\n")
    return load_job(folder / "job.yaml").job


def train(model: nn.Module, steps: int = 6) -> list[float]:
    language = lay_out_for(unwrap(model))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(steps):
        parts = language.lay_out([(np.arange(2, 34, dtype=np.uint32), np.ones(32, bool))], CPU)
        total = torch.zeros(())
        for inputs in parts:
            with packed_row.segments(inputs.segments):
                total = total + language.loss(inputs)[0]
        total.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(total.detach()))
    return losses


@torch.no_grad()
def logits(model: nn.Module) -> Tensor:
    return model.eval()(input_ids=torch.arange(2, 34)[None], use_cache=False).logits


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("family", "router"), [("hunyuan_v1_moe", "gate.wg"), ("phimoe", "router")])
def test_routers_that_are_linear_layers_stay_whole(family: str, router: str, form: str, tmp_path: Path) -> None:
    pytest.importorskip(quantise.FORMS[form].package)
    whole = tiny(family, dtype=torch.float32, **WIDTHS)
    whole.save_pretrained(tmp_path / "m")
    model = build_model(job(tmp_path, form), tmp_path, choose_device("fp32"))
    inner, path = unwrap(model), f"model.layers.1.mlp.{router}"
    assert torch.equal(inner.get_submodule(path).weight, whole.get_submodule(path).weight)
    assert type(inner.get_output_embeddings()) is nn.Linear and packed_parameters(model)
    losses = train(model)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(("family", "form"), CELLS)
@pytest.mark.often("gpt2", "llama", "glm4")
def test_a_family_trains_and_plain_peft_answers_the_same(family: str, form: str, tmp_path: Path) -> None:
    pytest.importorskip(quantise.FORMS[form].package)
    base = written(family, tmp_path)
    model = build_model(job(base, form), base, choose_device("fp32"))
    packed_now = packed_parameters(model)
    assert packed_now and not any(p.requires_grad for p in packed_now)
    losses = train(model)
    assert losses[-1] < 0.95 * losses[0]
    assert isinstance(model, PeftModel)
    save_adapter(model, base / "adapter", "base")

    settings = quantisation(form, torch.float32)
    plain = AutoModelForCausalLM.from_pretrained(base / "m", dtype=torch.float32, quantization_config=settings)
    compute_exactly(plain)
    again = PeftModel.from_pretrained(plain, str(base / "adapter"))
    ours, theirs = logits(model), logits(again)
    # Attention is computed by another kernel; bitsandbytes rounds activations to 8 bits where it only infers.
    tolerance = 5e-2 if form == "8bit" else 1e-4
    assert float((ours - theirs).abs().max() / ours.std()) < tolerance


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_torchao_has_nothing_for_gpt2_and_the_other_package_is_named(form: str, tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    block = ModelBlock(name="m", quantise=form)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="quantises no layer of a gpt2") as raised:
        load_model(block, written("gpt2", tmp_path), seed=0)
    assert {"int8": "8bit", "int4": "4bit"}[form] in str(raised.value.problems[0].suggestion)


def test_gradients_go_through_the_base_after_an_evaluation_too(tmp_path: Path) -> None:
    model = build_model(job(written("llama", tmp_path), "4bit"), tmp_path, choose_device("fp32"))

    def gradients() -> list[Tensor]:
        model.zero_grad()
        model.train()(input_ids=torch.arange(2, 34)[None]).logits.square().sum().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    before, _ = gradients(), logits(model)
    after = gradients()
    assert len(before) == len(after) == 2 * 14
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("form", ["none", *FORMS])
@pytest.mark.often("none", "4bit")
def test_blocks_with_lora_share_one_graph(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two graphs in all: the first block's input needs no gradient."""
    if form != "none":
        pytest.importorskip(quantise.FORMS[form].package)
    monkeypatch.setitem(WIDTHS, "num_hidden_layers", 4)
    model = build_model(job(written("llama", tmp_path), form), tmp_path, choose_device("fp32"))
    trained = [p for p in model.parameters() if p.requires_grad]
    with torch.no_grad():
        for p in trained:
            p.normal_(std=0.3)
    ids = torch.arange(2, 34)[None]

    def step() -> list[Tensor]:
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        return [loss, *torch.autograd.grad(loss, trained)]

    expected = step()
    torch.compiler.reset()
    counters.clear()
    for block in blocks_of(unwrap(model)):
        block.forward = torch.compile(block.forward, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(step(), expected, rtol=1e-5, atol=1e-6)
    assert counters["stats"]["unique_graphs"] == 2


def test_packed_weights_are_counted_as_what_they_hold(tmp_path: Path) -> None:
    whole = load_model(ModelBlock(name="m"), written("llama", tmp_path), seed=0)
    for form in ("4bit", "8bit"):
        held = load_model(ModelBlock(name="m", quantise=form), tmp_path, seed=0)  # type: ignore[arg-type]
        assert sum(map(unpacked_numel, held.parameters())) == whole.num_parameters()
        bytes_held = sum(p.numel() * p.element_size() for p in packed_parameters(held))
        linear = sum(unpacked_numel(p) for p in packed_parameters(held))
        assert bytes_held == linear * {"4bit": 0.5, "8bit": 1}[form]


def test_a_processor_computes_a_quantised_base_in_float32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker.hardware.process_device.has_bf16_matrix_units", lambda: True)
    quantised = job(written("llama", tmp_path), "4bit")
    plain = quantised.model_copy(update={"model": ModelBlock(name="m")})
    assert (device_for(quantised, CPU).precision, device_for(plain, CPU).precision) == ("fp32", "bf16")


@pytest.mark.parametrize(("form", "missing", "hint"), [
    ("4bit", "bitsandbytes", r"stoker\[quantise\]"), ("int8", "torchao", r"stoker\[torchao\]"),
])  # fmt: skip
def test_a_package_that_is_missing_is_named(
    form: str, missing: str, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantise, "find_spec", lambda name: None if name == missing else object())
    with pytest.raises(UserError) as raised:
        quantisation(form, torch.float32)
    problem = raised.value.problems[0]
    assert missing in problem.message
    assert "stoker[" in str(problem.suggestion) and quantise.OTHER[form] in str(problem.suggestion)


@pytest.mark.parametrize(("family", "form", "width", "says"), [
    ("llama", "int4", 48, r"32 inputs, and the layer model\.layers\.0\.mlp\.down_proj has 48"),
    ("llama", "4bit", 96, "bitsandbytes reads layers of 96 inputs wrongly"),
    ("gpt2", "4bit", 96, "bitsandbytes reads layers of 96 inputs wrongly"),
])  # fmt: skip
def test_widths_that_the_package_does_not_quantise_are_refused(
    family: str, form: str, width: int, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(quantise.FORMS[form].package)
    monkeypatch.setattr(quantise, "_is_unpacked_right", lambda width, _: width % 64 == 0)
    inner = {"n_embd": 64, "n_inner": width} if family == "gpt2" else WIDTHS | {"intermediate_size": width}
    model = tiny(family, dtype=torch.float32, **inner)
    with pytest.raises(UserError, match=says):
        quantised_copy(model, form, torch.float32)


def test_widths_that_bitsandbytes_unpacks_wrongly_are_found() -> None:
    """By the values of nf4, as a lookup in its table gives them."""
    functional = pytest.importorskip("bitsandbytes").functional
    for width in (48, 64, 72, 96, 128):
        weight = torch.randn(64, width, generator=torch.Generator().manual_seed(0))
        packed, state = functional.quantize_4bit(weight, quant_type="nf4")
        halves = torch.stack([packed.flatten() >> 4, packed.flatten() & 15], dim=1).flatten()
        expected = state.code[halves.int()] * state.absmax.repeat_interleave(64)
        right = torch.allclose(functional.dequantize_4bit(packed, state).flatten(), expected)
        assert (width in quantise.damaged_widths({width}, CPU)) == (not right), width


def test_a_base_that_is_unpacked_wrongly_is_named_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quantised, device = job(written("llama", tmp_path), "4bit"), choose_device("fp32")
    model = build_model(quantised, tmp_path, device)
    for odd, warned in ((128, True), (96, False)):
        monkeypatch.setattr(quantise, "_is_unpacked_right", lambda width, _, odd=odd: width != odd)
        line = quantise.describe_quantisation(quantised, device, Layout(), model)
        assert ("WARNING: the installed bitsandbytes reads layers of 128 inputs wrongly" in str(line)) == warned


def test_a_base_of_another_width_is_refused_with_the_layers_name(tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    tiny("llama", dtype=torch.float32, **WIDTHS | {"intermediate_size": 48}).save_pretrained(tmp_path / "m")
    with pytest.raises(UserError, match=r"the layer model\.layers\.0\.mlp\.down_proj has 48") as raised:
        build_model(job(tmp_path, "int4"), tmp_path, choose_device("fp32"))
    assert raised.value.problems[0].key == "model.quantise"


def test_random_weights_are_not_quantised(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="starts from random weights"):
        load_model(ModelBlock(name="llama-3m", quantise="4bit"), tmp_path, seed=0)


@pytest.mark.parametrize(("form", "dtype"), [
    ("4bit", torch.bfloat16), ("8bit", torch.float32), ("int8", torch.float32), ("int4", torch.bfloat16),
])  # fmt: skip
def test_weights_that_are_stored_quantised_answer_and_are_not_trained_without_being_named(
    form: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    pytest.importorskip(quantise.FORMS[form].package)
    model = tiny("llama", dtype=torch.float32, **WIDTHS)
    held = quantised_copy(model, form, dtype).eval()
    held.save_pretrained(tmp_path / "m")
    blank = blank_model(ModelBlock(name="m"), tmp_path, seed=0, stored_in_bits=True)
    assert packed_parameters(blank.model)
    close = 1e-5 if dtype == torch.float32 else 5e-2
    expected, found = logits(held).float(), logits(blank.model).float()
    assert (found - expected).abs().max() <= close * expected.abs().max()
    assert not any(getattr(module, quantise.AVX512, False) for module in blank.model.modules())
    with pytest.raises(UserError, match="stored quantised") as raised:
        build_model(job(tmp_path, "none"), tmp_path, choose_device("fp32"))
    assert raised.value.problems[0].key == "model.name"


@pytest.mark.parametrize("form", ["4bit", "8bit"])
def test_a_base_that_is_stored_in_the_bits_of_the_job_is_used(form: str, tmp_path: Path) -> None:
    pytest.importorskip(quantise.FORMS[form].package)
    held = quantised_copy(tiny("llama", dtype=torch.float32, **WIDTHS), form, torch.float32).eval()
    held.save_pretrained(tmp_path / "m")
    blank = blank_model(ModelBlock(name="m", quantise=form), tmp_path, seed=0)
    assert packed_parameters(blank.model)
    expected, found = logits(held).float(), logits(blank.model).float()
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    other = {"4bit": "8bit", "8bit": "4bit"}[form]
    with pytest.raises(UserError, match="stored quantised"):
        blank_model(ModelBlock(name="m", quantise=other), tmp_path, seed=0)
