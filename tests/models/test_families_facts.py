"""Every fact of every family against the model it speaks of: paths, counts, stages."""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from families import SMALL_GEMMA4, deep
from stoker.job.blocks.tune_block import TuneBlock
from stoker.models.attention import packed_attention, packed_row
from stoker.models.attention.collate import Inputs, pack
from stoker.models.blocks import blocks_path
from stoker.models.families import FAMILIES
from stoker.models.families.facts import Family, regions_of, submodule
from stoker.models.families.facts_check import placement_problem
from stoker.models.prepare_architecture import training_form
from stoker.models.tuning.adapters import add_adapter, unwrap
from stoker.parallel.pipeline_split import keep_stage_modules

# What a configuration may leave out, and what that configuration is.
OPTIONAL: dict[str, dict[str, Any]] = {
    "phi": {"qk_layernorm": True},
    "gemma4_text": SMALL_GEMMA4,
    "deepseek_v2": {"q_lora_rank": 12},
    "deepseek_v3": {"q_lora_rank": None},
    "glm4_moe_lite": {"q_lora_rank": None},
}
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in FAMILIES if not FAMILIES[name].refused.get("pipeline")),
    ("opt", {"do_layer_norm_before": False}),
    ("opt", {"do_layer_norm_before": False, "word_embed_proj_dim": 32}),
    ("granite", {"embedding_multiplier": 3.0}),
]


def built(family: str, **changes: Any) -> nn.Module:
    model = deep(family, **changes).eval()
    training_form(model)
    return model


def attribute_at(block: Any, path: str) -> Any:
    try:
        return attrgetter(path)(block)
    except AttributeError:
        return None


@pytest.mark.parametrize("name", FAMILIES)
def test_every_path_is_in_the_model(name: str) -> None:
    family, model = FAMILIES[name], built(name)
    models = [model, *([built(name, **OPTIONAL[name])] if name in OPTIONAL else [])]
    for path in (family.embedding, *family.first, *family.last, *family.positions):
        assert any(submodule(each, path) is not None for each in models), path
    blocks = [block for each in models for block in each.get_submodule(family.blocks).children()]
    paths = [*family.whole]
    for region in family.regions:
        paths += [region.enter, *region.column, *region.row, *region.shared, *region.wide_norms]
        assert all(any(attribute_at(b, path) is not None for b in blocks) for path in region.per_head), region
        paths += [region.experts] if region.experts else []
        assert set(region.keys_values) <= {*region.column, *region.wide_norms}
    for path in paths:
        assert any(attribute_at(block, path) is not None for block in blocks), path
    own = [path for region in family.regions for path in (*region.counts, *region.key_counts)]
    for path in (*own, *family.counts, *family.key_counts, *family.groups):
        value = [attribute_at(block, path) for block in blocks]
        assert any(isinstance(v, int) for v in value), path
    for path in family.per_head:
        holder, _, attribute = path.rpartition(".")
        assert len(getattr(blocks[0].get_submodule(holder), attribute)) == 8


@pytest.mark.parametrize("name", FAMILIES)
def test_every_parameter_has_its_place(name: str) -> None:
    model = built(name)
    assert placement_problem(model, FAMILIES[name]) is None
    adapted = add_adapter(model, TuneBlock.model_validate({"method": "lora", "rank": 2, "alpha": 4.0}))
    assert placement_problem(unwrap(adapted), FAMILIES[name]) is None


@pytest.mark.parametrize("name", FAMILIES)
def test_the_blocks_of_a_family_are_found_without_its_facts(name: str) -> None:
    assert blocks_path(built(name)) == FAMILIES[name].blocks


def lacking(family: Family, path: str) -> Family:
    """The facts without what they say about one path."""
    regions = tuple(
        replace(
            r,
            column=tuple(p for p in r.column if p != path),
            row=tuple(p for p in r.row if p != path),
            shared=tuple(p for p in r.shared if p != path),
        )
        for r in family.regions
    )
    return replace(family, regions=regions, whole=tuple(p for p in family.whole if p != path))


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("llama", "self_attn.v_proj"),
        ("llama", "input_layernorm"),
        ("qwen3", "self_attn.k_norm"),
        ("qwen2_moe", "mlp.shared_expert_gate"),
        ("gpt2", "attn.c_attn.key"),
        ("opt", "fc2"),
        ("deepseek_v3", "self_attn.q_a_layernorm"),
    ],
)
def test_a_parameter_without_a_place_is_named(name: str, path: str) -> None:
    problem = placement_problem(built(name), lacking(FAMILIES[name], path))
    assert problem is not None and f".{path}." in problem


def test_a_parameter_of_heads_without_a_place_is_named() -> None:
    problem = placement_problem(built("gpt_oss"), replace(FAMILIES["gpt_oss"], per_head=()))
    assert problem is not None and problem.endswith("self_attn.sinks")


def test_norms_of_all_heads_are_refused() -> None:
    """Cohere's larger models have them, with a weight for each head that no fact speaks of."""
    problem = placement_problem(built("cohere", use_qk_norm=True), FAMILIES["cohere"])
    assert problem is not None and "q_norm" in problem


def test_blocks_of_two_kinds_have_their_own_regions() -> None:
    family, model = FAMILIES["qwen3_moe"], built("qwen3_moe")
    kinds = [
        [region.experts for region in regions_of(block, family)]
        for block in model.get_submodule(family.blocks).children()
    ]
    assert kinds == [[None, "mlp.experts"], [None, None], [None, "mlp.experts"], [None, "mlp.experts"]]


@pytest.fixture
def row() -> Inputs:
    """A packed row of three documents."""
    generator = np.random.default_rng(3)
    documents = [generator.integers(2, 128, length).astype(np.uint32) for length in (14, 9, 17)]
    return pack([(ids, np.ones(len(ids), bool)) for ids in documents], torch.device("cpu"), share=False)


@pytest.mark.parametrize("after", [1, 2])
@pytest.mark.parametrize(("name", "changes"), VARIANTS)
@pytest.mark.usefixtures("no_float32")
def test_two_stages_are_the_whole(name: str, changes: dict[str, Any], after: int, row: Inputs) -> None:
    family, model = FAMILIES[name], built(name, **changes)
    packed_attention.register()
    model.set_attn_implementation(packed_attention.NAME)  # type: ignore[operator]
    first, last = copy.deepcopy(model), copy.deepcopy(model)
    keep_stage_modules(first, family, range(after), first=True, last=False)
    keep_stage_modules(last, family, range(after, 4), first=False, last=True)
    with packed_row.segments(row.segments), torch.no_grad():
        expected = hidden(model, row, input_ids=row.ids)
        handed = hidden(first, row, input_ids=row.ids)
        given = hidden(last, row, inputs_embeds=handed)
    assert torch.equal(given, expected) and not torch.equal(handed, expected)

    names = [{n for n, _ in stage.named_parameters()} for stage in (first, last)]
    assert not names[0] & names[1]
    assert names[0] | names[1] == {n for n, _ in model.named_parameters(remove_duplicate=False)}


def hidden(model: Any, row: Inputs, **what: torch.Tensor) -> torch.Tensor:
    return model.base_model(**what, position_ids=row.positions, use_cache=False).last_hidden_state


def test_the_documented_table_is_of_these_families() -> None:
    text = (Path(__file__).parents[2] / "docs" / "families.md").read_text()
    documented = dict(re.findall(r"^\| `(\w+)` \| `([\w.]+)` \|", text, re.MULTILINE))
    assert documented == {name: family.blocks for name, family in FAMILIES.items()}
    for name, family in FAMILIES.items():
        line = next(line for line in text.splitlines() if line.startswith(f"| `{name}` |"))
        assert all(f"{axis}:" in line for axis in family.refused)
        assert all(fused.path in line for fused in family.fused)
