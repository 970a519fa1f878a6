"""Which settings are looked at, against what the families' own facts say."""

from __future__ import annotations

import pytest

from families import tiny
from stoker.hardware.machines.cluster_file import load_cluster
from stoker.models.families import FAMILIES
from stoker.plan.search import search
from stoker.plan.search_space import SPLIT, WHOLE, supports_axis
from stoker.plan.setting import TrainingWork
from stoker.plan.shapes.model_names import shape_named
from stoker.plan.shapes.shape_of_config import shape_of_config


def test_the_families_are_those_whose_facts_are_known() -> None:
    assert set(SPLIT) == set(FAMILIES)
    assert {name: tuple(family.refused) for name, family in FAMILIES.items() if family.refused} == WHOLE


@pytest.mark.parametrize(
    ("family", "axis", "can"),
    [("llama", "tensor", True), ("falcon", "pipeline", False), ("nanochat", "pipeline", False), ("", "context", True)],
)
def test_axes_of_families(family: str, axis: str, can: bool) -> None:
    assert supports_axis(family, axis) is can


def test_a_pipeline_is_never_short_of_micro_batches() -> None:
    for words in ("16x8xH100", "1x8xH100"):
        for model in ("gpt2-xl", "llama3-8b"):
            for plan in search(TrainingWork(shape_named(model), 1024, 128), load_cluster(words)).plans:
                assert plan.setting.micro_batches >= plan.setting.layout.pipeline


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"])
def test_linear_attention_limits_tensor_and_excludes_context(family: str) -> None:
    sizes = {"num_key_value_heads": 4, "linear_num_key_heads": 2, "hidden_size": 4096, "max_position_embeddings": 16384}
    config = tiny(family, **sizes).config.to_dict()
    plans = search(TrainingWork(shape_of_config(config), 16384, 8), load_cluster("1x8xH100")).plans
    assert {plan.setting.layout.tensor for plan in plans} == {1, 2}
    assert {plan.setting.layout.context for plan in plans} == {1}
