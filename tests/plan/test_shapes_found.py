"""Shapes found by a name, a file or a row of a table, and what is said where there is none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stoker.errors import UserError
from stoker.plan.shapes import shape_named, shape_of_config, shape_of_model, shape_of_row
from stoker.plan.shapes.catalogue import CATALOGUE

# Sizes as published, and what the models are: MosaicML, nanotron's playbook, Megatron-LM, Meta.
ROWS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"model_name": "nanotron-1.34B", "params": 1.34e9, "layers": 16, "hidden": 2048, "heads": 32, "kv_heads": 32,
      "ffn": 8192, "vocab": 131072}, {"gated": True, "tied": True}),
    ({"model_name": "nanotron-8.86B", "params": 8.86e9, "layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 32,
      "ffn": 14336, "vocab": 131072}, {"gated": True, "tied": False}),
    ({"model_name": "nanotron-80B", "params": 8e10, "layers": 80, "hidden": 8192, "heads": 64, "kv_heads": 64,
      "ffn": 28672, "vocab": 131072}, {"gated": True, "tied": False}),
    ({"model_name": "GPT-L12-h1024", "layers": 12, "hidden": 1024, "heads": 16, "ffn": 4096, "vocab": 50257,
      "seq_len": 1024}, {"gated": False, "tied": True, "positions": 1024}),
    ({"model_name": "MT-NLG-530B", "params": 5.3e11, "layers": 105, "hidden": 20480, "heads": 128, "ffn": 81920,
      "vocab": 51200}, {"gated": False, "tied": True}),
    ({"model_name": "a model", "layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336,
      "vocab": 128256}, {"gated": True, "tied": False, "norm": "rms", "parameters": 8_030_261_248}),
    ({"model_name": "llama3-405b truncated to 4 layers", "layers": 4, "hidden": 16384, "heads": 128, "kv_heads": 16,
      "ffn": 53248, "vocab": 128256}, {"kv_heads": 16, "layers": 4, "gated": True}),
    ({"model_name": "GPT OSS 120B", "params": 1.17e11, "active_params": 5.1e9, "layers": 36, "hidden": 2880,
      "heads": 64, "kv_heads": 8, "vocab": 201088}, {"parameters": 116_829_156_672}),
    ({"model_name": "Kimi_K2"}, {"parameters": 1_026_408_209_408}),
    ({"model_name": "bloomz-7b1 LoRA + DeepSpeed CPU offload", "params": 7.1e9}, {"parameters": 7_069_016_064}),
    ({"model_name": "mt0-xxl-12B LoRA", "params": 1.2e10}, {"parameters": 12_921_057_280}),
]  # fmt: skip


@pytest.mark.parametrize(("row", "meant"), ROWS, ids=lambda part: part.get("model_name", ""))
def test_rows_of_tables(row: dict[str, Any], meant: dict[str, Any]) -> None:
    shape = shape_of_row(row)
    assert {key: getattr(shape, key) for key in meant} == meant
    assert shape.name == row["model_name"]


def test_rows_that_state_little() -> None:
    dense = shape_of_row({"model_name": "a model", "params": 2e10})
    assert dense.parameters == pytest.approx(2e10, rel=0.15)
    sparse = shape_of_row(
        {"model_name": "a model", "params": 1e11, "active_params": 1e10, "layers": 40, "hidden": 4096, "heads": 32}
    )
    assert sparse.parameters == pytest.approx(1e11, rel=0.02)
    assert sparse.active_parameters == pytest.approx(1e10, rel=0.02)
    with pytest.raises(UserError, match="unknown"):
        shape_of_row({"model_name": "a model"})


SAME = {
    "meta-llama/Llama-3.1-8B-Instruct": "llama3-8b", "Meta-Llama-3-70B": "llama3-70b", "LLAMA3.1_405B": "llama3.1-405b",
    "Llama-2-7b-chat-hf": "llama2-7b", "Qwen/Qwen2.5-0.5B": "qwen2.5-0.5b", "Qwen3_30B_a3B": "qwen3-30b-a3b",
    "DeepSeekV3": "deepseek-v3", "EleutherAI/pythia-1.4b-deduped": "pythia-1.4b", "Pythia-14b": None, "gpt": None,
    "HuggingFaceTB/SmolLM2-135M": "smollm2-135m", "Mixtral-8x7B-v0.1": "mixtral-8x7b",
    "google/gemma-2-9b-it": "gemma2-9b",
    "Phi-3-mini-4k-instruct": "phi3-mini", "Nemotron_3_5_Lightning": "nemotron3-nano",
}  # fmt: skip


@pytest.mark.parametrize(("name", "meant"), SAME.items())
def test_names(name: str, meant: str | None) -> None:
    if meant is None:
        with pytest.raises(UserError, match="no well-known shape"):
            shape_named(name)
    else:
        assert shape_named(name) == shape_named(meant)


def test_no_two_shapes_share_a_name() -> None:
    assert all(shape_named(name).name == name for name in CATALOGUE)


BAD: list[tuple[dict[str, Any], str]] = [
    ({}, "no `model_type`"),
    ({"model_type": "lama"}, "unknown family of models `lama`; write `llama`"),
    ({"model_type": "llama", "hidden_size": "wide"}, "`hidden_size` .* is 'wide'; write a whole number"),
    ({"model_type": "llama", "num_hidden_layers": 0}, "write a whole number of at least 1"),
    ({"model_type": "deepseek_v2"}, "no `num_experts_per_tok`"),
    ({"model_type": "nemotron_h", "hybrid_override_pattern": "MX"}, "unknown layer 'X'"),
    ({"model_type": "gemma2", "layer_types": 3}, "write a list of words"),
]


@pytest.mark.parametrize(("config", "message"), BAD)
def test_bad_configurations(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        shape_of_config(config)


def test_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gemma3", "text_config": {"hidden_size": 640}}')
    assert shape_of_model(str(tmp_path)).width == 640
    (tmp_path / "config.json").write_text('{"model_type": \n 3,,}')
    with pytest.raises(UserError, match=r"config.json:2:4: the configuration is no JSON"):
        shape_of_model(str(tmp_path))
    with pytest.raises(UserError, match="cannot read"):
        shape_of_model(str(tmp_path / "none.json"))
    with pytest.raises(UserError, match="write `llama3-8b`"):
        shape_of_model("llama3-8c")


def test_shapes_need_no_torch() -> None:
    code = "import stoker.plan.shapes, sys; print({'torch', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
