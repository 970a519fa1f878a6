"""Which layers get an adapter, and which are trained whole: by name, by pattern, by block, in every family."""

from __future__ import annotations

import pytest
from peft import LoraConfig, get_peft_model

from families import SHAPES, tiny
from stoker.errors import UserError
from stoker.job.blocks.tune_block import TuneBlock
from stoker.job.keys.tune_keys import block_numbers
from stoker.models.prepare_architecture import training_form
from stoker.models.tuning.adapter_targets import layers_to_adapt, modules_trained_whole

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]
DEFAULTS = {
    "gpt2": ["c_attn", "c_fc", "c_proj"],
    "bloom": ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"],
    "opt": ["q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2", "project_in", "project_out"],
    "gpt_neo": ["q_proj", "k_proj", "v_proj", "out_proj", "c_fc", "c_proj"],
    "gptj": ["q_proj", "k_proj", "v_proj", "out_proj", "fc_in", "fc_out"],
    "gpt_neox": ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"],
    "llama": [*ATTENTION, *MLP],
    "glm": [*ATTENTION, "gate_up_proj", "down_proj"],
    "glm4": [*ATTENTION, "gate_up_proj", "down_proj"],
    "qwen3": [*ATTENTION, *MLP],
    "mistral": [*ATTENTION, *MLP],
    "phi3": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],
    "granite": [*ATTENTION, *MLP],
    "olmo2": [*ATTENTION, *MLP],
    "starcoder2": [*ATTENTION, "c_fc", "c_proj"],
    "nanochat": [*ATTENTION, "fc1", "fc2"],
    "apertus": [*ATTENTION, "up_proj", "down_proj"],
    "falcon": ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"],
    "mixtral": ATTENTION,
    "qwen3_moe": ATTENTION,
    "llama4_text": [*ATTENTION, *MLP],  # of dense layers and of shared experts
    "qwen2_moe": [*ATTENTION, *MLP, "shared_expert_gate"],  # those of the shared expert
}


def chosen(family: str = "llama", whole: tuple[str, ...] = (), **changes: object) -> list[str]:
    """The layers as they are called in transformers, each once."""
    model = tiny(family)
    training_form(model)
    tune = TuneBlock.model_validate({"method": "lora", "alpha": 8.0, **changes})
    return list(dict.fromkeys(layer.called for layer in layers_to_adapt(model, tune, whole)))


def leaves(names: list[str]) -> set[str]:
    return {name.rpartition(".")[2] for name in names}


@pytest.mark.parametrize("family", DEFAULTS)
def test_the_default_is_every_linear_layer_but_head_routers_and_experts(family: str) -> None:
    found = chosen(family)
    assert leaves(found) == set(DEFAULTS[family])
    if not any(
        kind in family for kind in ("moe", "mixtral", "llama4")
    ):  # there peft takes stacked experts and routers as well
        reference = get_peft_model(tiny(family), LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM"))
        adapted = {name for name, module in reference.named_modules() if hasattr(module, "lora_A")}
        assert {f"base_model.model.{name}" for name in found} == adapted


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        (["*.self_attn.*"], ATTENTION),
        (["mlp.*"], MLP),
        (["[qv]_proj"], ["q_proj", "v_proj"]),
        (["*_proj", "q_proj"], [*ATTENTION, *MLP]),
        (["model.layers.1.mlp.up_proj"], ["up_proj"]),
        (["*"], [*ATTENTION, *MLP]),  # a pattern means neither the head nor the embedding
        (["lm_head", "embed_tokens"], ["lm_head", "embed_tokens"]),
    ],
)
def test_names_and_patterns(targets: list[str], expected: list[str]) -> None:
    assert leaves(chosen(targets=targets)) == set(expected)


def test_a_fused_layer_goes_by_its_name_and_by_those_of_its_parts() -> None:
    assert chosen("gpt2", targets=["h.0.attn.*"]) == ["transformer.h.0.attn.c_attn", "transformer.h.0.attn.c_proj"]
    assert leaves(chosen("phi3", targets=["*.self_attn.qkv_proj"])) == {"qkv_proj"}
    model = tiny("gpt2")
    training_form(model)
    tune = TuneBlock.model_validate({"method": "lora", "alpha": 8.0, "targets": ["c_attn.query", "value"]})
    found = {layer.name.partition(".attn.")[2] for layer in layers_to_adapt(model, tune, ())}
    assert found == {"c_attn.query", "c_attn.value"}


@pytest.mark.parametrize(
    ("family", "experts"), [("mixtral", "mlp.experts"), ("qwen3_moe", "mlp.experts"), ("llama4_text", "experts")]
)
def test_experts_are_adapted_where_they_are_named(family: str, experts: str) -> None:
    assert leaves(chosen(family, targets=["q_proj", f"{experts}.*"])) == {"q_proj", "gate_up_proj", "down_proj"}
    with pytest.raises(UserError, match=r"tune.dropout: the adapter of stacked experts .*gate_up_proj"):
        chosen(family, targets=["experts.gate_up_proj"], dropout=0.1)


def test_a_dense_layer_that_peft_takes_for_an_expert() -> None:
    model = tiny("qwen3_moe", mlp_only_layers=[1])
    assert "model.layers.1.mlp.up_proj" in dict(model.named_modules())

    def found(targets: object) -> set[str]:
        tune = TuneBlock.model_validate({"method": "lora", "alpha": 8.0, "targets": targets})
        return {layer.name for layer in layers_to_adapt(model, tune, ())}

    assert leaves(list(found("all-linear"))) == set(ATTENTION)
    with pytest.raises(UserError, match=r"takes the name 'mlp.up_proj' for that of this model's experts"):
        found(["mlp.up_proj"])


def test_all_linear_leaves_out_routers_that_are_linear_layers() -> None:
    router = "model.layers.0.mlp.gate.wg"
    assert router in chosen("hunyuan_v1_moe", targets=["gate.wg"])
    assert router not in chosen("hunyuan_v1_moe")


@pytest.mark.parametrize("family", SHAPES)
def test_blocks_are_counted_in_every_family(family: str) -> None:
    everywhere, second = chosen(family), chosen(family, layers="1-")
    assert second and set(second) == {name for name in everywhere if ".1." in name}


@pytest.mark.parametrize(
    ("written", "numbers"),
    [("0-3,20-", {0, 1, 2, 3, 20, 21, 22, 23}), ("5", {5}), ("23-,0", {0, 23}), ("7-7", {7})],
)
def test_numbers_and_ranges_of_blocks(written: str, numbers: set[int]) -> None:
    assert block_numbers(written, 24) == numbers


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"targets": ["q_porj"]}, "no layer 'q_porj'; did you mean 'q_proj'"),
        ({"targets": ["*.self_atn.*"]}, r"did you mean '\*.self_attn.\*'"),
        ({"targets": ["mlp"]}, r"did you mean 'mlp.\*'"),
        ({"targets": ["attn.q_proj", "v_proj"]}, "no layer 'attn.q_proj'"),
        ({"layers": "2-"}, "tune.layers: the model has the blocks 0 to 1, and none of the number 2-"),
        ({"layers": "1-0"}, "runs backwards; write 0-1"),
        ({"layers": "0", "targets": ["lm_head"]}, "no layer to adapt in the blocks 0"),
        ({"targets": ["lm_head"], "whole": ("lm_head",)}, "'lm_head' is trained whole by modules_to_save"),
    ],
)
def test_what_means_no_layer_is_told_with_the_nearest(changes: dict[str, object], says: str) -> None:
    with pytest.raises(UserError, match=says):
        chosen(**changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("family", "names", "expected"),
    [
        ("llama", ["lm_head"], ["lm_head"]),
        ("qwen3", ["embed_tokens", "*norm"], ["model.embed_tokens", *[f"model.layers.{i}.{n}" for i in range(2) for n in
            ("self_attn.q_norm", "self_attn.k_norm", "input_layernorm", "post_attention_layernorm")], "model.norm"]),
        ("gpt2", ["lm_head"], ["transformer.wte", "lm_head"]),  # tied: both names of one matrix
        ("gpt2", ["h.0.attn.c_attn", "h.0.attn"], ["transformer.h.0.attn"]),
        ("mixtral", ["layers.1.mlp.gate"], ["model.layers.1.mlp.gate"]),
    ],
)  # fmt: skip
def test_modules_that_are_trained_whole(family: str, names: list[str], expected: list[str]) -> None:
    model = tiny(family)
    training_form(model)
    assert modules_trained_whole(model, names) == expected
    assert not set(chosen(family, whole=tuple(expected))) & set(expected)


@pytest.mark.parametrize("written", ["wq_b", "*.indexer.*"])
def test_an_indexer_which_gets_no_gradient_is_not_trained(written: str) -> None:
    assert leaves(chosen("deepseek_v32")) == {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"}
    with pytest.raises(UserError, match=r"tune.targets: '.*' gets no gradient in this model"):
        chosen("deepseek_v32", targets=[written])
    with pytest.raises(UserError, match=r"tune.modules_to_save: '.*' gets no gradient in this model"):
        modules_trained_whole(tiny("deepseek_v32"), [written])


def test_a_module_that_is_not_there_is_told_with_the_nearest() -> None:
    with pytest.raises(UserError, match="no module 'lm_haed'; did you mean 'lm_head'"):
        modules_trained_whole(tiny("llama"), ["lm_haed"])
