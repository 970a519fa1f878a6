"""An adapter of a model with split layers, as plain peft and plain transformers load it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from stoker.checkpoint.export.adapter_export import save_adapter
from stoker.checkpoint.export.write_export import merged_model
from stoker.job.blocks.tune_block import TuneBlock
from stoker.models.prepare_architecture import training_form
from stoker.models.tuning.adapters import add_adapter

IDS = torch.arange(2, 30)[None]
SHAPE: dict[str, Any] = {"vocab_size": 64, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None}
LIKE_LLAMA: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "glm4": {**LIKE_LLAMA, "head_dim": 8},
    "phi3": LIKE_LLAMA,
}
CASES: list[tuple[str, Any]] = [
    ("gpt2", "all-linear"),
    ("gpt2", ["c_attn"]),
    ("gpt2", ["c_attn.query", "mlp.c_proj"]),  # one part of three
    ("gpt2", ["h.0.attn.c_attn", "value"]),  # other parts in other blocks
    ("glm4", ["gate_up_proj", "q_proj"]),
    ("phi3", "all-linear"),
]


def plain(family: str) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SHAPE, **FAMILIES[family])).eval()


def trained(base: PreTrainedModel, targets: Any, changes: dict[str, bool]) -> PeftModel:
    """An adapted model as it is in training, whose matrices are not zero, as after some steps."""
    model = copy.deepcopy(base)
    training_form(model)
    block = {"method": "lora", "rank": 4, "alpha": 6.0, "targets": targets, **changes}
    adapted = add_adapter(model, TuneBlock.model_validate(block))
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "magnitude" in name:
                parameter.mul_(1.5)
            elif "lora_" in name:
                parameter.normal_(std=0.1)
    return adapted.eval()


@pytest.mark.parametrize("changes", [{}, {"rslora": True}, {"dora": True}], ids=["lora", "rslora", "dora"])
@pytest.mark.parametrize(("family", "targets"), CASES)
def test_peft_loads_it_on_the_plain_model(family: str, targets: Any, changes: dict[str, bool], tmp_path: Path) -> None:
    base = plain(family)
    model = trained(base, targets, changes)
    untuned, expected = (m(input_ids=IDS).logits for m in (base, model))
    assert not torch.allclose(expected, untuned, atol=1e-2)

    save_adapter(model, tmp_path / "adapter", "base")
    loaded = PeftModel.from_pretrained(copy.deepcopy(base), str(tmp_path / "adapter")).eval()
    torch.testing.assert_close(loaded(input_ids=IDS).logits, expected, rtol=0, atol=1e-6)

    merged_model(model).save_pretrained(tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    assert {n: p.shape for n, p in merged.named_parameters()} == {n: p.shape for n, p in base.named_parameters()}
    torch.testing.assert_close(merged(input_ids=IDS).logits, expected, rtol=0, atol=2e-6)
