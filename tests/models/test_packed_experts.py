"""Experts in 4 bits: they compute as their unpacked values, keep no copy of them, and other programs pack the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel
from peft.tuners.lora.layer import ParamWrapper
from test_expert_lora import IDS, gradients
from test_quantise import job, logits, train
from torch import Tensor, nn
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM

from families import tiny
from stoker.checkpoint.export.adapter_export import save_adapter
from stoker.hardware.process_device import choose_device
from stoker.job.layout import Layout
from stoker.models.blocks import blocks_of
from stoker.models.build_model import build_model
from stoker.models.tuning import packed_experts
from stoker.models.tuning.adapters import unwrap
from stoker.models.tuning.lora import fuse_lora
from stoker.models.tuning.packed_experts import PackedExperts, pack_loaded_experts, stacks_of
from stoker.models.tuning.quantise import compute_exactly, describe_quantisation, quantisation, unpacked_numel

functional = pytest.importorskip("bitsandbytes").functional
# Of 64 inputs: bitsandbytes' own unpacking is wrong for others, on a processor.
WIDTHS: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
OTHER_WIDTHS = {"qwen3_moe": {"moe_intermediate_size": 64}}
FAMILIES = ("mixtral", "gpt_oss", "llama4_text", "qwen3_moe")


def built(family: str, folder: Path, tune: str = "", layers: str = "all", **widths: Any) -> tuple[nn.Module, nn.Module]:
    """A mixture as it is, and with a base in 4 bits."""
    whole = tiny(family, dtype=torch.float32, **WIDTHS | OTHER_WIDTHS.get(family, {}) | widths)
    whole.save_pretrained(folder / "m")
    wanted = job(folder, "4bit")
    if tune:
        block = wanted.tune.model_validate({**wanted.tune.model_dump(), "targets": [tune], "layers": layers})
        wanted = wanted.model_copy(update={"tune": block})
    torch.manual_seed(0)
    model = build_model(wanted, folder, choose_device("fp32"))
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.normal_(std=0.3)
    return whole, model


def packed_of(model: nn.Module) -> dict[str, PackedExperts]:
    return {name: m for name, m in unwrap(model).named_modules() if isinstance(m, PackedExperts)}


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_experts_compute_as_their_unpacked_values(family: str, tmp_path: Path) -> None:
    whole, model = built(family, tmp_path)
    stacks, packed = stacks_of(whole), packed_of(model)
    assert packed.keys() == stacks.keys() and packed
    for name, experts in packed.items():
        nf4, state = functional.quantize_4bit(stacks[name].data, quant_type="nf4", compress_statistics=True)
        state.shape = torch.Size((1, stacks[name].numel()))
        values = functional.dequantize_4bit(nf4, state).view(stacks[name].shape)
        assert torch.equal(experts.unpack(), values) and not torch.equal(values, stacks[name])
        assert unpacked_numel(experts.weight) == values.numel() == 2 * experts.weight.numel()
    found, answers = gradients(model), logits(model)
    for name, experts in packed.items():
        holder, _, key = name.rpartition(".")
        owner = unwrap(model).get_submodule(holder)
        delattr(owner, key)
        owner.register_parameter(key, nn.Parameter(experts.unpack(), requires_grad=False))
    torch.testing.assert_close(logits(model), answers, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found, gradients(model.train()), rtol=1e-5, atol=1e-6)


def test_no_unpacked_copy_is_kept_for_the_backward_pass(tmp_path: Path) -> None:
    _, model = built("mixtral", tmp_path)
    largest = max(experts.shape.numel() for experts in packed_of(model).values())
    kept: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(input_ids=IDS, labels=IDS, use_cache=False)
    assert max(kept) < largest / 2


def test_experts_with_adapters_stay_whole_and_are_named(tmp_path: Path) -> None:
    whole, model = built("mixtral", tmp_path, "experts.down_proj")
    assert {name.rpartition(".")[2] for name in packed_of(model)} == {"gate_up_proj"}
    line = describe_quantisation(job(tmp_path, "4bit"), choose_device("fp32"), Layout(), model)
    rest = sum(p.numel() for name, p in stacks_of(whole).items() if name.endswith("down_proj"))
    assert f"; {rest / 1e6:,.1f} M parameters of experts are not quantised" in str(line)
    losses = train(model)
    assert losses[-1] < losses[0]


def test_experts_of_blocks_without_adapters_are_packed(tmp_path: Path) -> None:
    _, model = built("mixtral", tmp_path, "experts.down_proj", layers="0")
    packed = [(name.split(".")[2], name.rpartition(".")[2]) for name in packed_of(model)]
    assert sorted(packed) == [("0", "gate_up_proj"), ("1", "down_proj"), ("1", "gate_up_proj")]


def test_experts_beyond_the_count_of_bitsandbytes_stay_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_experts, "MOST", 4 * 64 * 64)
    _, model = built("mixtral", tmp_path)
    assert {name.rpartition(".")[2] for name in packed_of(model)} == {"down_proj"}


def test_blocks_with_packed_experts_compile_without_breaks(tmp_path: Path) -> None:
    _, model = built("mixtral", tmp_path, num_hidden_layers=4)
    expected = gradients(model)
    torch.compiler.reset()
    counters.clear()
    for block in blocks_of(unwrap(model)):
        block.forward = torch.compile(block.forward, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(gradients(model), expected, rtol=1e-5, atol=1e-5)
    assert counters["stats"]["unique_graphs"] == 2


@pytest.mark.parametrize(("family", "tune"), [("mixtral", ""), ("gpt_oss", ""), ("mixtral", "experts.down_proj")])
def test_plain_peft_answers_the_same_with_experts_packed_by_bitsandbytes(
    family: str, tune: str, tmp_path: Path
) -> None:
    _, model = built(family, tmp_path, tune)
    assert isinstance(model, PeftModel)
    save_adapter(model, tmp_path / "adapter", "base")
    settings = quantisation("4bit", torch.float32)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.float32, quantization_config=settings)
    compute_exactly(plain)
    again = PeftModel.from_pretrained(plain, str(tmp_path / "adapter"))
    ours, before = logits(model), logits(again)
    pack_loaded_experts(again)
    after = logits(again)
    apart = [float((ours - theirs).abs().max() / ours.std()) for theirs in (before, after)]
    assert apart[0] > 1e-2 and apart[1] < 1e-4


def test_experts_with_products_of_their_own_stay_whole_and_keep_peft_s_pass() -> None:
    """Such code calls functions of torch, which take tensors."""

    class Experts(nn.Module):
        num_experts = 4

        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Parameter(torch.randn(4, 64, 64))

        def forward(self, x: Tensor) -> Tensor:
            return torch.bmm(x.expand(4, *x.shape), self.up).sum(0)

    model = nn.ModuleDict({"experts": Experts()})
    assert list(stacks_of(model)) == ["experts.up"]
    pack_loaded_experts(model)
    assert isinstance(model["experts"].up, nn.Parameter) and model["experts"].up.ndim == 3
    config = LoraConfig(target_parameters=["experts.up"], target_modules=[], r=8)
    wrapper = ParamWrapper(model["experts"], "default", "up", config, r=8, lora_alpha=8)
    nn.init.normal_(wrapper.lora_B["default"].weight)
    x = torch.randn(3, 64)
    expected = wrapper(x)
    assert fuse_lora(nn.ModuleList([wrapper])) == 0
    torch.testing.assert_close(wrapper(x), expected)
