"""LoRA on stacked experts by grouped products: peft's own values and gradients, without its copy of the experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from packaging.version import Version
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn
from torch._dynamo.utils import counters

from families import tiny
from stoker.job.blocks.tune_block import TuneBlock
from stoker.models.blocks import blocks_of
from stoker.models.prepare_architecture import training_form
from stoker.models.tuning.adapters import add_adapter, unwrap
from stoker.models.tuning.lora import fuse_lora

IDS = torch.arange(2, 34)[None]
FAMILIES = ("mixtral", "gpt_oss", "llama4_text", "qwen3_moe")
WHOLE = Version(torch.__version__) >= Version("2.13")  # torch 2.11 breaks where the parameter is put back
BOTH = ["experts.gate_up_proj", "experts.down_proj"]


def adapted(
    family: str, targets: list[str], dtype: torch.dtype = torch.float64, rank: int = 3, **sizes: Any
) -> nn.Module:
    base = tiny(family, dtype=dtype, **sizes)
    if family != "llama4_text":  # as in models that are loaded
        base.set_experts_implementation("grouped_mm")
    training_form(base)
    block = {"method": "lora", "rank": rank, "alpha": 6.0, "targets": [*targets, "q_proj"]}
    model = add_adapter(base, TuneBlock.model_validate(block))
    torch.manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.normal_(std=0.3)
    return model


def gradients(model: nn.Module) -> list[Tensor]:
    loss = model(input_ids=IDS, labels=IDS, use_cache=False).loss
    return [loss, *torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad])]


def whole(model: nn.Module) -> list[ParamWrapper]:
    """peft's own pass again."""
    found = [m for m in model.modules() if isinstance(m, ParamWrapper)]
    for wrapper in found:
        del wrapper._activate_lora
    return found


@pytest.mark.parametrize("targets", [BOTH, BOTH[1:]], ids=["both", "one"])
@pytest.mark.parametrize("family", FAMILIES)
def test_values_and_gradients_are_peft_s(family: str, targets: list[str]) -> None:
    model = adapted(family, targets)
    names = [name for name, _ in model.named_parameters()]
    fuse_lora(model)
    found = gradients(model)
    assert [name for name, _ in model.named_parameters()] == names
    with torch.no_grad(), model.disable_adapter():  # type: ignore[operator]
        plain = model(input_ids=IDS, use_cache=False).logits
    assert whole(model)
    torch.testing.assert_close(found, gradients(model), rtol=1e-9, atol=1e-10)
    with torch.no_grad(), model.disable_adapter():  # type: ignore[operator]
        torch.testing.assert_close(plain, model(input_ids=IDS, use_cache=False).logits, rtol=1e-12, atol=1e-12)


def test_no_copy_of_the_experts_is_kept() -> None:
    model = adapted("mixtral", BOTH, hidden_size=64, intermediate_size=64)
    largest = max(p.numel() for p in model.parameters() if p.ndim == 3)
    experts = {p.data_ptr() for p in model.parameters() if p.ndim == 3}

    def copies() -> int:
        kept: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
            model(input_ids=IDS, labels=IDS, use_cache=False)
        return sum(t.numel() >= largest / 2 and t.data_ptr() not in experts for t in kept)

    assert copies() > 0
    fuse_lora(model)
    assert copies() == 0


def test_blocks_compile_without_breaks() -> None:
    model = adapted("mixtral", BOTH, torch.float32, rank=8, num_hidden_layers=4)
    fuse_lora(model)
    expected = gradients(model)
    torch.compiler.reset()
    counters.clear()
    for block in blocks_of(unwrap(model)):
        block.forward = torch.compile(block.forward, fullgraph=WHOLE, backend="aot_eager")
    torch.testing.assert_close(gradients(model), expected, rtol=1e-4, atol=1e-5)


def test_another_rank_keeps_peft_s_own_pass() -> None:
    """torch's grouped products refuse rows of 12 bytes."""
    model = adapted("mixtral", BOTH, torch.float32)
    expected = gradients(model)
    fuse_lora(model)
    torch.testing.assert_close(gradients(model), expected, rtol=1e-3, atol=1e-5)
