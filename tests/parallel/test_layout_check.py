"""Layouts that a model cannot have are refused before a process starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PhimoeConfig,
    PhimoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from families import tiny
from stoker.job.layout import layout_of
from stoker.job.load_job import load_job
from stoker.models.families import FAMILIES
from stoker.models.meta_model import META
from stoker.models.split_fused import split_fused
from stoker.parallel.layout_check import layout_problem

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "pad_token_id": 0, "max_position_embeddings": 64,
}  # fmt: skip
GROWING = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4, "original_max_position_embeddings": 64}
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "rope_theta": 1e4}


def models() -> dict[str, Any]:
    longer = {**SIZES, "max_position_embeddings": 512, "original_max_position_embeddings": 64}
    phi = Phi3Config(**longer, rope_parameters=LONG)
    llama = LlamaConfig(**longer, rope_parameters=GROWING)
    with META:
        return {"longrope": Phi3ForCausalLM(phi), "dynamic": LlamaForCausalLM(llama)}


@pytest.mark.parametrize(
    ("key", "refused"),
    [("hidden_size_per_layer_input", True), ("num_kv_shared_layers", True), ("sliding_window", False)],
)
def test_a_configuration_that_excludes_stages_is_named(key: str, refused: bool, tmp_path: Path) -> None:
    gemma4 = {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "num_hidden_layers": 4, "head_dim": 16}
    layers = ["sliding_attention", "full_attention"] * 2
    config = Gemma4TextConfig(**{**SIZES, **gemma4, "layer_types": layers, key: 2})
    with META:
        model = Gemma4ForCausalLM(config)
    (tmp_path / "job.yaml").write_text("task: pretrain\nmodel: m\ndata: d\nparallel: {pipeline: 2}\n")
    loaded = load_job(tmp_path / "job.yaml")
    problem = layout_problem(model, layout_of(loaded.job), loaded)
    assert (problem is not None) == refused
    if problem is not None:
        assert problem.key == "parallel.pipeline" and f"gemma4_text with `{key}` cannot" in problem.message


@pytest.mark.parametrize(("second", "refused"), [("shared", True), ("full", False)])
def test_blocks_that_share_selected_keys_are_not_cut_into_stages(second: str, refused: bool, tmp_path: Path) -> None:
    with META:
        model = tiny("glm_moe_dsa", dtype=torch.float32, indexer_types=["full", second])
    (tmp_path / "job.yaml").write_text("task: pretrain\nmodel: m\ndata: d\nparallel: {pipeline: 2}\n")
    loaded = load_job(tmp_path / "job.yaml")
    problem = layout_problem(model, layout_of(loaded.job), loaded)
    assert (problem is not None) == refused
    if problem is not None:
        assert "glm_moe_dsa with `indexer_types: shared` cannot be split so" in problem.message


@pytest.mark.parametrize("groups", [(2, 1), (4, 3)])
def test_heads_that_differ_by_layer_are_shared_out_in_each(groups: tuple[int, int], tmp_path: Path) -> None:
    keys, full = groups
    heads = {"num_attention_heads": 12, "num_key_value_heads": keys, "num_global_key_value_heads": full, "head_dim": 8}
    layers = ["sliding_attention", "full_attention"]
    small = {"attention_k_eq_v": True, "hidden_size_per_layer_input": 0, "layer_types": layers}
    with META:
        model = Gemma4ForCausalLM(Gemma4TextConfig(**{**SIZES, **heads, **small}))
    (tmp_path / "job.yaml").write_text("task: pretrain\nmodel: m\ndata: d\nparallel: {tensor: 4}\n")
    loaded = load_job(tmp_path / "job.yaml")
    problem = layout_problem(model, layout_of(loaded.job), loaded)
    assert (problem is not None) == (full == 3)
    if problem is not None:
        assert "12 attention heads with 3 of keys and values" in problem.message


@pytest.mark.parametrize(
    ("kind", "seq_len", "context", "refused"),
    [
        ("longrope", 128, 2, True), ("longrope", 64, 2, False), ("longrope", 128, 1, False),
        ("dynamic", 512, 2, False),  # max_position_embeddings, above which alone the frequencies change
    ],
)  # fmt: skip
def test_rotary_embeddings_by_the_length_of_the_row(
    kind: str, seq_len: int, context: int, refused: bool, tmp_path: Path
) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(
        f"task: pretrain\nmodel: m\ndata: d\ntrain: {{seq_len: {seq_len}}}\n"
        f"parallel: {{context: {context}, pipeline: {3 - context}}}\n"
    )
    loaded, model = load_job(path), models()[kind]
    split_fused(model, FAMILIES[model.config.model_type])
    problem = layout_problem(model, layout_of(loaded.job), loaded)
    assert (problem is not None) == refused
    if problem is not None:
        assert problem.key == "parallel.context" and kind in problem.message and "seq_len: 64" in problem.suggestion


@pytest.mark.parametrize(("experts", "tensor", "refused"), [(2, 4, True), (4, 4, False), (2, 2, False), (2, 1, False)])
def test_every_process_has_an_expert(experts: int, tensor: int, refused: bool, tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(f"task: pretrain\nmodel: m\ndata: d\nparallel: {{tensor: {tensor}, pipeline: 2}}\n")
    sizes = {**SIZES, "num_attention_heads": 4, "num_key_value_heads": 4}
    with META:
        model = MixtralForCausalLM(MixtralConfig(**sizes, num_local_experts=experts))
    loaded = load_job(path)
    split_fused(model, FAMILIES["mixtral"])
    problem = layout_problem(model, layout_of(loaded.job), loaded)
    assert (problem is not None) == refused
    if problem is not None:
        assert problem.message == "parallel.tensor: 2 experts cannot be shared out over 4 processes"
        assert problem.suggestion == "write 2 or less"


@pytest.mark.parametrize(("parallel", "says"), [
    ("{tensor: 4}", "parallel.tensor: 2 key heads of linear attention cannot be shared out over 4 processes"),
    ("{context: 2}", "its linear attention carries a state along the row"),
    ("{tensor: 2, pipeline: 2}", None),
])  # fmt: skip
def test_linear_attention_has_whole_groups_of_heads_and_whole_rows(
    parallel: str, says: str | None, tmp_path: Path
) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(f"task: pretrain\nmodel: m\ndata: d\nparallel: {parallel}\n")
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
    with META:
        model = Qwen3NextForCausalLM(Qwen3NextConfig(**SIZES | heads))
    loaded = load_job(path)
    split_fused(model, FAMILIES["qwen3_next"])
    problem = layout_problem(model, layout_of(loaded.job), loaded)
    assert (problem is None) == (says is None)
    if problem is not None and says is not None:
        assert says in problem.message


@pytest.mark.parametrize(
    ("noise", "sequence", "refused"), [(0.01, "true", True), (0.01, "false", False), (0.0, "true", False)]
)
def test_routers_that_draw_experts_see_no_split_sequence(
    noise: float, sequence: str, refused: bool, tmp_path: Path
) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(f"task: pretrain\nmodel: m\ndata: d\nparallel: {{tensor: 2, sequence: {sequence}}}\n")
    with META:
        model = PhimoeForCausalLM(PhimoeConfig(**SIZES, router_jitter_noise=noise))
    loaded = load_job(path)
    problem = layout_problem(model, layout_of(loaded.job), loaded)
    assert (problem is not None) == refused
    if problem is not None:
        assert "draw random numbers" in problem.message and problem.suggestion == "write `sequence: false`"
