"""Shapes of models of which a row of a table states only sizes."""

from __future__ import annotations

from typing import Any

import pytest
from planner_runs.shapes import shape_of_row

from stoker.errors import UserError
from stoker.plan.time.flop import model_flop_per_token

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


def test_palm_convention_gives_published_utilisation() -> None:
    """MosaicML's MPT-7B, 65,536 tokens, 8 A100: 8,108 tokens/s are 46.97% of 312 TFLOP/s (llm-foundry's table)."""
    row = {"params": 6918905856, "layers": 32, "hidden": 4096, "heads": 32, "ffn": 16384, "vocab": 50368}
    shape = shape_of_row({"model_name": "MPT-7b", "seq_len": 65536, **row})
    assert shape.parameters == row["params"]
    rate = model_flop_per_token(shape, seq_len=65536) * 8108 / 8
    assert rate / 312e12 == pytest.approx(0.4697, rel=0.002)
