"""Adapters on some layers, with modules trained whole and two learning rates, under layouts: as in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from stoker.job.load_job import load_job
from stoker.launch.process_pool import Pool
from stoker.verify.layout_cases import Cell
from stoker.verify.toy_job import make_twin
from stoker.verify.verifier import Verifier

SOME: dict[str, Any] = {
    "targets": ["*.self_attn.*", "mlp.down_proj"],
    "layers": "0-1",
    "modules_to_save": ["lm_head", "embed_tokens", "*norm"],
    "loraplus_ratio": 8.0,
}
TIED: dict[str, Any] = {"modules_to_save": ["lm_head", "h.0.attn.c_attn"], "loraplus_ratio": 8.0}
ONE_STAGE: dict[str, Any] = {"layers": "3"}  # nothing is trained on the first of two stages
ZERO3 = Cell("zero3", {"data": 2, "shard": "zero3"})
TENSOR = Cell("tensor 2 + sequence", {"tensor": 2, "sequence": True})
BOTH = Cell("zero2 + tensor", {"data": 2, "shard": "zero2", "tensor": 2})
PIPELINE = Cell("1f1b", {"pipeline": 2, "schedule": "1f1b"})
INTERLEAVED = Cell("interleaved", {"pipeline": 2, "schedule": "interleaved"})
GROUPED = {"num_attention_heads": 8, "num_key_value_heads": 2}


@pytest.mark.parametrize(
    ("family", "tune", "cells"),
    [
        pytest.param("llama", SOME, [ZERO3, TENSOR, INTERLEAVED], marks=pytest.mark.exhaustive),
        ("gpt2", TIED, [BOTH, PIPELINE]),
        ("llama", ONE_STAGE, [PIPELINE]),
    ],
    ids=["some", "tied", "one stage"],
)
@pytest.mark.often("one stage")
def test_adapters_compute_what_one_process_does(
    family: str, tune: dict[str, Any], cells: list[Cell], pool: Pool, tmp_path: Path
) -> None:
    (tmp_path / "job.yaml").write_text("task: sft\nmodel: some/model\ndata: none.jsonl\nsteps: 3\ntune: lora\n")
    config = AutoConfig.for_model(family, **GROUPED if family == "llama" else {})
    twin = make_twin(load_job(tmp_path / "job.yaml"), tmp_path, tmp_path, steps=3, config=config)
    twin.base["tune"] |= tune
    verdicts = list(map(Verifier(twin, pool, whole=False).verdict, cells))
    assert [(v.cell.name, v.passed, v.reason) for v in verdicts] == [(cell.name, True, "") for cell in cells]
