"""Adapters of every family as plain peft loads them: LoRA, rsLoRA, DoRA, and modules trained whole beside them."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, PreTrainedModel

from stoker.checkpoint.export.adapter_export import save_adapter
from stoker.checkpoint.export.write_export import merged_model
from stoker.job.blocks.tune_block import TuneBlock
from stoker.models.prepare_architecture import training_form
from stoker.models.tuning.adapters import add_adapter

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))
from families import tiny

IDS = torch.arange(2, 30)[None]
TEN = "gpt2 bloom opt gpt_neo gptj gpt_neox llama glm4 qwen3 mistral".split()  # noqa: SIM905
MORE = "glm phi3 granite falcon mixtral qwen3_moe llama4_text".split()  # noqa: SIM905
KINDS: dict[str, dict[str, Any]] = {"lora": {}, "rslora": {"rslora": True}, "dora": {"dora": True}}
ENDS: dict[str, list[str]] = {  # embedding, head and last norm
    "gpt2": ["wte", "ln_f"], "gptj": ["wte", "lm_head", "ln_f"], "glm4": ["embed_tokens", "lm_head", "model.norm"],
    "phi3": ["lm_head", "layers.0.self_attn.qkv_proj"], "opt": ["lm_head", "decoder.layers.1.fc1"],
    "llama": ["lm_head"], "bloom": ["word_embeddings", "ln_f"], "qwen3": ["embed_tokens"],
}  # fmt: skip


def trained(base: PreTrainedModel, changes: dict[str, Any]) -> PeftModel:
    """An adapted model as it is in training, whose trained weights are others than at first."""
    model = copy.deepcopy(base)
    training_form(model)
    block = {"method": "lora", "rank": 4, "alpha": 6.0, **changes}
    adapted = add_adapter(model, TuneBlock.model_validate(block))
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "magnitude" in name:
                parameter.mul_(1.2)
            elif "lora_" in name:
                parameter.normal_(std=0.1)
            elif parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return adapted.eval()


def check(base: PreTrainedModel, changes: dict[str, Any], folder: Path, *, bound: float = 1e-9) -> dict[str, Any]:
    """Compares what plain programs make of the adapter and of the merged model; gives peft's configuration."""
    model = trained(base, changes)
    untuned, expected = (m(input_ids=IDS).logits for m in (base, model))
    assert not torch.allclose(expected, untuned, atol=1e-2)
    save_adapter(model, folder / "adapter", "base")
    loaded = PeftModel.from_pretrained(copy.deepcopy(base), str(folder / "adapter")).eval()
    torch.testing.assert_close(loaded(input_ids=IDS).logits, expected, rtol=bound, atol=bound)

    merged_model(model).save_pretrained(folder / "merged")
    merged = AutoModelForCausalLM.from_pretrained(folder / "merged", dtype=torch.float32).eval()
    assert [n for n, _ in merged.named_parameters()] == [n for n, _ in base.named_parameters()]
    scale = float(expected.abs().max())
    assert float((merged(input_ids=IDS).logits.double() - expected).abs().max()) < 1e-4 * scale
    return json.loads((folder / "adapter" / "adapter_config.json").read_text())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", TEN)
@pytest.mark.often("gpt2", "llama", "glm4")
def test_peft_loads_every_family(family: str, kind: str, tmp_path: Path) -> None:
    config = check(tiny(family).eval(), KINDS[kind], tmp_path)
    assert (config["use_dora"], config["use_rslora"]) == (kind == "dora", kind == "rslora")
    fused = family in ("gpt2", "glm4")  # such a layer has more than one LoRA in training
    assert bool(config["rank_pattern"]) == bool(config["alpha_pattern"]) == fused


@pytest.mark.parametrize("family", MORE)
def test_other_families_answer_alike_through_peft(family: str, tmp_path: Path) -> None:
    check(tiny(family).eval(), {}, tmp_path)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "llama4_text"])
def test_experts_too(family: str, tmp_path: Path) -> None:
    bound = 1e-6 if family == "llama4_text" else 1e-9  # it rounds routers' scores and norms to float32
    changes = {"targets": ["q_proj", "experts.*"], "layers": "1-"}
    config = check(tiny(family).eval(), changes, tmp_path, bound=bound)
    assert {name.partition(".experts.")[2] for name in config["target_parameters"]} == {"gate_up_proj", "down_proj"}


@pytest.mark.parametrize("family", ENDS)
def test_modules_trained_whole_are_in_pefts_file(family: str, tmp_path: Path) -> None:
    changes = {"modules_to_save": ENDS[family], "targets": ["*"], "layers": "1"}
    base = tiny(family).eval()
    tied = base.get_output_embeddings().weight is base.get_input_embeddings().weight
    config = check(base, changes, tmp_path)
    named = {name.rpartition(".")[2] for name in config["modules_to_save"]}
    assert named >= {name.rpartition(".")[2] for name in ENDS[family]}
    ends = {name for name, module in base.named_modules() if module in (base.lm_head, base.get_input_embeddings())}
    assert config["ensure_weight_tying"] == (tied and ends <= set(config["modules_to_save"]))


@pytest.mark.parametrize(
    ("family", "targets"),
    [("gpt2", ["wte", "c_attn"]), ("phi3", ["embed_tokens", "qkv_proj"]), ("qwen3", ["lm_head", "q_proj"])],
)
def test_adapters_of_one_end_of_tied_weights(family: str, targets: list[str], tmp_path: Path) -> None:
    base = tiny(family, tie_word_embeddings=True).eval()
    model = trained(base, {"targets": targets})
    expected = model(input_ids=IDS).logits
    save_adapter(model, tmp_path / "adapter", "base")
    loaded = PeftModel.from_pretrained(copy.deepcopy(base), str(tmp_path / "adapter")).eval()
    torch.testing.assert_close(loaded(input_ids=IDS).logits, expected, rtol=1e-9, atol=1e-9)
    merged_model(model).save_pretrained(tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()
    assert float((merged(input_ids=IDS).logits.double() - expected).abs().max()) < 1e-4 * float(expected.abs().max())
