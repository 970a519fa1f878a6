"""What is trained where the model is frozen: counted as peft counts, and its memory as autograd keeps it."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import (
    LoraConfig,
    PrefixTuningConfig,
    PromptEncoderConfig,
    PromptEncoderReparameterizationType,
    PromptTuningConfig,
    get_peft_model,
)
from transformers import AutoConfig, AutoModelForCausalLM

from families import LLAMA_LIKE, SHAPES, SMALL_GEMMA4
from stoker.hardware.machines.cluster import cluster_of
from stoker.hardware.machines.device_names import device_kind
from stoker.job.blocks.tune_block import TuneBlock
from stoker.job.layout import Layout
from stoker.job.load_job import load_job
from stoker.models.prepare_architecture import training_form
from stoker.models.tuning.adapters import add_adapter
from stoker.plan.block_dtypes import block_dtypes
from stoker.plan.memory.head_memory import CHUNK
from stoker.plan.memory.memory_formulas import stage_memory
from stoker.plan.memory.saved_activations import EagerBlock
from stoker.plan.planned_job import adapters_of, shape_of_name, work_of
from stoker.plan.setting import Setting, TrainingWork
from stoker.plan.shapes.shape_of_config import shape_of_config
from stoker.plan.time.step_time import step_time
from stoker.plan.trainable_params import PLAIN, Adapters, trained_elements

GATED: dict[str, Any] = {
    "hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 160,
    "num_hidden_layers": 4, "vocab_size": 256,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": GATED,
    "gpt2": {"n_embd": 64, "n_head": 8, "n_inner": 160, "n_layer": 4, "vocab_size": 256},
    "gpt_neox": {key: value for key, value in GATED.items() if key != "num_key_value_heads"},
}
TASK = {"task_type": "CAUSAL_LM"}
LSTM = PromptEncoderReparameterizationType.LSTM
# (the job's `tune`, peft's configuration of the same)
METHODS: list[tuple[str, Any]] = [
    ("{method: lora, rank: 3}", LoraConfig(r=3, target_modules="all-linear", **TASK)),
    ("{method: prompt, tokens: 7}", PromptTuningConfig(num_virtual_tokens=7, **TASK)),
    ("{method: p-tuning, tokens: 7, width: 24}", PromptEncoderConfig(
        num_virtual_tokens=7, encoder_hidden_size=24, **TASK)),
    ("{method: p-tuning, tokens: 7}", PromptEncoderConfig(num_virtual_tokens=7, encoder_hidden_size=64, **TASK)),
    ("{method: p-tuning, tokens: 5, encoder: lstm, width: 24}", PromptEncoderConfig(
        num_virtual_tokens=5, encoder_hidden_size=24, encoder_reparameterization_type=LSTM, **TASK)),
    ("{method: p-tuning, tokens: 7, deep: true}", PrefixTuningConfig(num_virtual_tokens=7, **TASK)),
    ("{method: prefix, tokens: 7, projection: false}", PrefixTuningConfig(num_virtual_tokens=7, **TASK)),
    ("{method: prefix, tokens: 7, width: 24}", PrefixTuningConfig(
        num_virtual_tokens=7, prefix_projection=True, encoder_hidden_size=24, **TASK)),
]  # fmt: skip
# Families beside those of `families.SHAPES`, and models of these with dense layers between those with experts.
FIRST_DENSE = {
    **LLAMA_LIKE,
    "num_hidden_layers": 3,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
LATENT = {
    **FIRST_DENSE,
    "num_key_value_heads": 4,
    "kv_lora_rank": 8,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}
TOKENS = {"vocab_size": 128, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None}
SOME_DENSE = {"num_hidden_layers": 3, "mlp_only_layers": [1]}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, SHAPES[family]) for family in SHAPES if family != "mamba"},  # peft refuses its products
    "gemma4_text small": ("gemma4_text", SHAPES["gemma4_text"] | SMALL_GEMMA4),
    **{f"{family} dense": (family, {**SHAPES[family], **SOME_DENSE}) for family in ("qwen2_moe", "qwen3_moe")},
    "glm4_moe": ("glm4_moe", {**FIRST_DENSE, "head_dim": 8}),
    "deepseek_v2": ("deepseek_v2", LATENT | {"topk_method": "greedy"}), "deepseek_v3": ("deepseek_v3", LATENT),
    **{family: (family, LLAMA_LIKE) for family in ("olmo2", "smollm3", "starcoder2")},
    "mpt": ("mpt", {"d_model": 32, "n_heads": 4, "n_layers": 2}),
}  # fmt: skip
# LoRA on a part of the modules: (model, keys of `tune`).
PARTS: list[tuple[str, str]] = [
    *[("llama", keys) for keys in (
        "targets: [q_proj]", "targets: [k_proj, o_proj, up_proj]", "targets: ['*.mlp.*']", "targets: ['*.self_attn.*']",
        "layers: '1-'", "modules_to_save: [lm_head]", "modules_to_save: [embed_tokens, norm]",
        "modules_to_save: [down_proj]")],
    *[("gpt2", keys) for keys in (
        "targets: [c_attn]", "targets: [query]", "targets: [c_proj]", "targets: ['*.attn.*']", "layers: '0'",
        "modules_to_save: [c_attn]")],
    *[("phi3", keys) for keys in (
        "targets: [qkv_proj]", "targets: [gate_up_proj]", "targets: [key, gate]", "modules_to_save: [gate_up_proj]")],
    *[("opt", keys) for keys in ("targets: [project_in]", "targets: [out_proj]", "layers: '0'")],
    *[("qwen2_moe dense", keys) for keys in (
        "targets: [gate_proj]", "targets: [down_proj]", "targets: [shared_expert_gate]")],
    *[("qwen3_moe dense", keys) for keys in ("targets: [down_proj, q_proj]", "targets: ['*.mlp.experts.*']")],
    *[("deepseek_v3", keys) for keys in (
        "targets: [q_a_proj, q_b_proj]", "targets: [kv_a_proj_with_mqa]", "targets: [kv_b_proj]")],
    *[("qwen3_next", keys) for keys in (
        "targets: [in_proj_qkvz, in_proj_ba]", "targets: [out_proj]", "targets: ['*.linear_attn.*']", "layers: '1'",
        "modules_to_save: [in_proj_ba]", "targets: [q_proj]")],
    *[("qwen3_5_text", keys) for keys in (
        "targets: [in_proj_qkv]", "targets: [query, in_proj_z]", "targets: [in_proj_a, in_proj_b, out_proj]",
        "modules_to_save: [in_proj_qkv]", "targets: ['*.self_attn.*']", "targets: ['*.mlp.*']")],
    *[("qwen3_5_moe_text", keys) for keys in ("targets: [up_proj]", "targets: [in_proj_z, k_proj]")],
    *[("llama4_text", keys) for keys in ("targets: [down_proj]", "targets: ['*.shared_expert.*']")],
    *[("gemma4_text small", keys) for keys in ("targets: [v_proj]", "targets: [k_proj, down_proj]", "layers: '3'",
        "targets: [per_layer_model_projection, per_layer_projection]")],
    *[("afmoe", keys) for keys in ("targets: ['*.self_attn.*']", "modules_to_save: [gate_proj]")],
    ("mixtral", "targets: [gate_up_proj, k_proj]"), ("qwen2", "modules_to_save: [q_proj]"),
    ("gpt_neo", "targets: [c_proj]"), ("gpt_neox", "modules_to_save: [dense]"), ("qwen3", "modules_to_save: [norm]"),
]  # fmt: skip


def on_meta(family: str) -> Any:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **CONFIGS[family]))
    training_form(model)
    return model


def tuned(tune: str, folder: Path, model: str = "m") -> Any:
    path = folder / "job.yaml"
    path.write_text(f"task: sft\nmodel: {model}\ndata: x\nsteps: 1\ntune: {tune}\ntrain: {{seq_len: 64, batch: 2}}\n")
    return load_job(path)


def count(model: Any) -> int:
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize(("tune", "config"), METHODS, ids=[tune for tune, _ in METHODS])
def test_methods_train_what_peft_trains(tune: str, config: Any, family: str, tmp_path: Path) -> None:
    job = tuned(tune, tmp_path).job
    shape = shape_of_config(AutoConfig.for_model(family, **CONFIGS[family]).to_dict())
    found = trained_elements(shape, job.tune.method, job.tune.rank, adapters_of(job.tune, shape.layers))
    assert found == count(get_peft_model(on_meta(family), copy.deepcopy(config)))


def counted_and_trained(model: str, keys: str, folder: Path) -> tuple[int, int]:
    """The elements that the planner counts, and those that LoRA of a rank of 3 trains in a tiny model."""
    job = tuned(f"{{method: lora, rank: 3, {keys}}}", folder).job
    family, sizes = MODELS[model]
    config = AutoConfig.for_model(family, **TOKENS | sizes)
    shape = shape_of_config(config.to_dict())
    built = AutoModelForCausalLM.from_config(config)
    training_form(built)
    counted = trained_elements(shape, "lora", 3, adapters_of(job.tune, shape.layers))
    return counted, count(add_adapter(built, job.tune))


@pytest.mark.parametrize("model", MODELS)
def test_all_linear_layers_count_as_they_are_trained(model: str, tmp_path: Path) -> None:
    counted, trained = counted_and_trained(model, "targets: all-linear", tmp_path)
    assert counted == trained


@pytest.mark.parametrize(("model", "keys"), PARTS)
def test_a_part_of_the_modules_counts_as_it_is_trained(model: str, keys: str, tmp_path: Path) -> None:
    counted, trained = counted_and_trained(model, keys, tmp_path)
    assert counted == trained


def test_memory_has_the_embeddings_for_every_block() -> None:
    config = AutoConfig.for_model("gemma4_text", **TOKENS | SHAPES["gemma4_text"] | SMALL_GEMMA4)
    work = TrainingWork(shape_of_config(config.to_dict()), 64, 4, precision="fp32")
    on_cpu = Setting(work, cluster_of(device_kind("cpu"), gpus=1, per_node=1), Layout(), 2)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert stage_memory(on_cpu, 0).parts["weights"] == 4 * sum(p.numel() for p in model.parameters())


def test_a_quantised_base_keeps_its_fused_layers() -> None:
    shape = shape_of_config({"model_type": "phi3", "num_hidden_layers": 1})
    width, hidden = shape.width, shape.mlp_width
    fused = width + shape.query_width + 2 * shape.key_value_width, width + 2 * hidden, hidden + width, 2 * width
    assert TrainingWork(shape, 64, 4, tuning="qlora", rank=2).trained == 2 * sum(fused)
    plain = TrainingWork(shape, 64, 4, tuning="lora", rank=2)
    assert plain.trained == 2 * (sum(fused) + 3 * width)
    assert replace(plain, quantise="8bit").trained == 2 * sum(fused)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("modules", [["lm_head"], ["embed_tokens"], ["lm_head", "embed_tokens"]])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_memory_has_the_weights_of_layers_that_are_trained_in_full(
    modules: list[str], tied: bool, precision: str
) -> None:
    """As the model has them: float32 in their place, and a tied embedding and head are one."""
    config = AutoConfig.for_model("llama", **GATED, tie_word_embeddings=tied)
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16 if precision == "bf16" else torch.float32)
    adapted = add_adapter(model, TuneBlock(method="lora", rank=3, alpha=2.0, modules_to_save=modules))
    sizes = {id(p): p.nbytes if not p.requires_grad else 4 * p.numel() for p in adapted.parameters()}
    shape = shape_of_config(config.to_dict())
    adapters = Adapters(modules=tuple(modules))
    work = TrainingWork(shape, 64, 4, precision=precision, tuning="lora", rank=3, adapters=adapters)
    on_cpu = Setting(work, cluster_of(device_kind("cpu"), gpus=1, per_node=1), Layout(), 2)
    assert work.trained == count(adapted)
    parts = stage_memory(on_cpu, 0).parts
    assert parts["weights"] == sum(sizes.values())
    assert (parts["gradients"], parts["optimizer"]) == (4 * count(adapted), 8 * count(adapted))


def test_the_last_stage_trains_the_head_and_the_first_the_embedding() -> None:
    shape = shape_of_config(AutoConfig.for_model("llama", **GATED, tie_word_embeddings=False).to_dict())
    work = TrainingWork(shape, 64, 4, precision="fp32", tuning="lora", adapters=Adapters(modules=("lm_head",)))
    cluster = cluster_of(device_kind("cpu"), gpus=2, per_node=2)
    split = Setting(work, cluster, Layout(pipeline=2), 1)
    first, last = (stage_memory(split, stage).parts for stage in (0, 1))
    head = shape.width * shape.vocabulary
    assert last["optimizer"] - first["optimizer"] == 8 * head
    none = replace(split, work=replace(work, adapters=PLAIN))
    assert last["head"] - stage_memory(none, 1).parts["head"] >= 4 * head


@pytest.mark.parametrize("pipeline", [1, 2])
@pytest.mark.parametrize("module", ["embed_tokens", "lm_head"])
def test_what_is_trained_whole_on_the_host_is_gathered_in_float32_and_a_head_copied_in_16_bits(
    module: str, pipeline: int
) -> None:
    shape = shape_of_config(AutoConfig.for_model("llama", **GATED, tie_word_embeddings=False).to_dict())
    shape = replace(shape, vocabulary=2**14)
    work = TrainingWork(shape, 64, 4, tuning="lora", adapters=Adapters(modules=(module,)))
    cluster = cluster_of(device_kind("cpu"), gpus=2 * pipeline, per_node=2 * pipeline)
    layout = Layout(data=2, shard="zero3", shard_size=2, pipeline=pipeline)
    on_device = Setting(work, cluster, layout, 1)
    on_host = replace(on_device, layout=replace(layout, offload="params"))
    copies = replace(on_device, layout=Layout(data=2, pipeline=pipeline))  # whole, in float32
    stage = pipeline - 1 if module == "lm_head" else 0
    before, after, whole = (stage_memory(each, stage).parts for each in (on_device, on_host, copies))
    elements = shape.width * shape.vocabulary
    assert after["gathered weights"] - before["gathered weights"] == 2 * elements
    if module == "lm_head":
        assert after["head"] - before["head"] == whole["head"] - before["head"] == 2 * elements


def setting(tune: str, folder: Path) -> Setting:
    loaded = tuned(tune, folder, "llama-10m")
    cluster = cluster_of(device_kind("cpu"), gpus=1, per_node=1)
    work = replace(work_of(loaded, cluster, base=folder), precision="fp32")
    return Setting(work, cluster, Layout(), 2)


def test_virtual_tokens_are_more_positions_and_no_more_predictions(tmp_path: Path) -> None:
    plain, prompt = setting("lora", tmp_path), setting("{method: prompt, tokens: 16}", tmp_path)
    assert (prompt.tokens, prompt.predicting) == (2 * (64 + 16), 2 * 64)
    prefix = setting("{method: prefix, tokens: 16}", tmp_path)
    assert (prefix.tokens, prefix.work.attended) == (2 * 64, 64 + 16)
    assert prompt.work.trained == 16 * prompt.shape.width
    parts = stage_memory(prompt, 0).parts
    assert parts["optimizer"] == 8 * 16 * prompt.shape.width
    assert parts["weights"] == 4 * (prompt.shape.parameters + 16 * prompt.shape.width)
    many = setting("{method: prompt, tokens: 64}", tmp_path)
    assert stage_memory(many, 0).parts["activations"] > 1.5 * parts["activations"]
    assert step_time(many).total > step_time(prompt).total > 0 and step_time(plain).total > 0


def test_a_prefix_keeps_its_keys_and_values_in_every_block(tmp_path: Path) -> None:
    few, many = (stage_memory(setting(f"{{method: prefix, tokens: {n}}}", tmp_path), 0).parts for n in (16, 48))
    shape = setting("lora", tmp_path).shape
    more = 2 * 32 * shape.layers * 2 * shape.key_value_width * 4  # rows, tokens, keys and values, float32
    assert many["activations"] - few["activations"] == pytest.approx(more, rel=1e-6)


def test_nothing_is_kept_of_what_frozen_products_read() -> None:
    shape = shape_of_config(AutoConfig.for_model("llama", **GATED).to_dict())
    trained, low_rank, frozen = (
        EagerBlock(shape, shape.layer(0), seq_len=64, types=types).saved()[0]
        for types in (block_dtypes("fp32"), block_dtypes("fp32", rank=4), block_dtypes("fp32", frozen=True))
    )
    width, hidden = shape.width, shape.mlp_width
    # One tensor read by queries, keys and values, one by the MLP, what its last product and that of attention read.
    narrow = 4 * (4 * 4 + 3 * 4)
    assert low_rank - frozen == 4 * (3 * width + hidden) + narrow
    assert trained > low_rank


# VmHWM in GiB after three steps of SmolLM2-135M, 2 rows of 256 tokens, one thread (benchmarks/tune_memory.py,
# 2026-11-21), less the logits of a chunk: since 2026-11-27 one of them is kept, not two. Tuning, how the base is held.
CHUNK_GIB = CHUNK / 2**30
MEASURED = (
    ("qlora", "none", 1.677 - CHUNK_GIB),
    ("lora", "8bit", 1.796 - CHUNK_GIB),
    ("lora", "int8", 1.808 - CHUNK_GIB),
    ("lora", "none", 2.036 - CHUNK_GIB),
)


@pytest.mark.parametrize(("tuning", "quantise", "measured"), MEASURED)
def test_the_largest_resident_size_of_real_runs(tuning: Any, quantise: str, measured: float) -> None:
    work = TrainingWork(
        shape_of_name("smollm2-135m", Path.cwd()), 256, 2, precision="fp32", tuning=tuning, quantise=quantise
    )
    cluster = cluster_of(device_kind("cpu"), gpus=1, per_node=1)
    assert stage_memory(Setting(work, cluster, Layout(), 2), 0).peak / 2**30 == pytest.approx(measured, rel=0.08)


def test_zero_shards_a_quantised_base_only_where_its_packed_weights_can_be_cut() -> None:
    cluster = cluster_of(device_kind("cpu"), gpus=4, per_node=4)
    shape = shape_of_name("smollm2-135m", Path.cwd())

    def weights(quantise: str, shard: Any) -> float:
        work = TrainingWork(shape, 256, 8, precision="fp32", tuning="lora", quantise=quantise)
        return stage_memory(Setting(work, cluster, Layout(data=4, shard=shard, shard_size=4), 2), 0).parts["weights"]

    assert weights("4bit", "zero3") < weights("4bit", "zero2") < weights("8bit", "zero2") == weights("8bit", "zero3")
