"""Memory of processes on a CPU: components in closed form, and the largest resident sizes of real runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from counted import lora_parameters
from transformers import AutoConfig

from stoker.hardware.machines.cluster import Cluster, cluster_of
from stoker.hardware.machines.cluster_file import load_cluster
from stoker.hardware.machines.device_names import device_kind
from stoker.job.layout import Layout, Recompute
from stoker.job.resolution.compile_choice import CompileChoice
from stoker.job.rollout_sizes import RolloutSizes
from stoker.plan.memory.memory_formulas import stage_memory
from stoker.plan.memory.stoker_memory import FIRST_BLOCK, PROCESS, eager_parts, stage_activations
from stoker.plan.planned_job import shape_of_name
from stoker.plan.setting import PACKED_BYTES, Setting, TrainingWork
from stoker.plan.shape import Shape
from stoker.plan.shapes.shape_of_config import shape_of_config
from stoker.plan.software import STOKER
from stoker.plan.trainable_params import Adapters, Tuning

# VmHWM in GiB after three steps (PyTorch 2.13, transformers 5.23, glibc, one thread, 2026-11-27).
MEASURED = (
    ("llama-3m", 128, 2, 2, "none", "full", 0.487),
    ("llama-10m", 512, 4, 4, "none", "full", 1.144),
    ("llama-10m", 512, 8, 8, "none", "full", 1.698),
    ("llama-30m", 512, 4, 4, "none", "full", 1.760),
    ("llama-30m", 512, 4, 2, "none", "full", 1.480),
    ("llama-30m", 1024, 2, 2, "full", "full", 1.301),
    ("llama-110m", 512, 1, 1, "none", "full", 2.627),
    ("smollm2-135m", 256, 1, 1, "none", "full", 2.946),
    ("smollm2-135m", 256, 2, 2, "none", "lora", 1.964),
    ("smollm2-135m", 512, 2, 2, "full", "full", 3.042),
)

# Peaks of the allocator in GiB with torch 2.11 for CUDA 13, in steps of four rows of 4,096 tokens; without a GPU
# (benchmarks/without_gpu), 2026-11-27 and 28. Llama's blocks are those of `benchmarks/gpu_shapes.py`.
PLAIN = {"vocab_size": 32000, "hidden_size": 2048, "num_attention_heads": 16, "max_position_embeddings": 4096}
GATED = {"intermediate_size": 5632, "num_key_value_heads": 4, "num_attention_heads": 32, "tie_word_embeddings": False}
PEAKS: tuple[tuple[str, dict[str, Any], int, Recompute, CompileChoice, float], ...] = (
    ("llama", {**PLAIN, **GATED}, 2, "none", "never", 7.256),
    ("llama", {**PLAIN, **GATED}, 2, "none", "always", 5.802),
    ("llama", {**PLAIN, **GATED}, 8, "full", "never", 9.263),
    ("opt", {**PLAIN, "ffn_dim": 8192, "word_embed_proj_dim": 2048, "dropout": 0.0}, 2, "none", "never", 5.680),
    ("opt", {**PLAIN, "ffn_dim": 8192, "word_embed_proj_dim": 2048, "dropout": 0.0}, 8, "full", "never", 9.009),
    ("gpt_neox", {**PLAIN, "intermediate_size": 8192}, 2, "none", "never", 6.572),
)


@pytest.mark.parametrize("row", PEAKS, ids=lambda row: f"{row[0]} {row[3]} {row[4]}")
def test_the_peak_of_a_gpu_is_that_of_its_allocator(row: tuple[Any, ...]) -> None:
    family, sizes, blocks, recompute, compiles, measured = row
    shape = shape_of_config(AutoConfig.for_model(family, **sizes, num_hidden_layers=blocks).to_dict())
    work = TrainingWork(shape, 4096, 4, precision="bf16")
    software = replace(STOKER, compiles=compiles)
    parts, _ = eager_parts(Setting(work, load_cluster("1xH200"), Layout(recompute=recompute), 4, software=software), 0)
    assert sum(parts.values()) / 2**30 == pytest.approx(measured, rel=0.01)


# The same with the vocabularies of published models, and of frozen bases: on 2026-11-28. Four rows of 4,096 tokens, one
# for QLoRA.
PLAIN_GPT: dict[str, Any] = {"n_embd": 2048, "n_head": 16, "n_positions": 4200, "resid_pdrop": 0.0}
FAMILY_PEAKS: tuple[tuple[str, dict[str, Any], Tuning, float], ...] = (
    ("bloom", {"vocab_size": 250880, "hidden_size": 2048, "n_head": 16}, "full", 14.733),
    ("llama", {**PLAIN, **GATED}, "lora", 3.767),
    ("llama", {**PLAIN, **GATED}, "qlora", 1.736),
    ("gpt2", PLAIN_GPT, "lora", 3.953),
    ("gpt_neox", {**PLAIN, "intermediate_size": 8192, "vocab_size": 50432}, "lora", 3.757),
)


@pytest.mark.parametrize("row", FAMILY_PEAKS, ids=lambda row: f"{row[0]} {row[2]}")
def test_the_peak_of_a_gpu_with_large_vocabularies_and_frozen_bases(row: tuple[Any, ...]) -> None:
    family, sizes, tuning, measured = row
    blocks = "n_layer" if family in ("bloom", "gpt2") else "num_hidden_layers"
    shape = shape_of_config(AutoConfig.for_model(family, **sizes, **{blocks: 2}).to_dict())
    rows = 1 if tuning == "qlora" else 4
    work = TrainingWork(shape, 4096, rows, precision="bf16", tuning=tuning)
    parts, _ = eager_parts(Setting(work, load_cluster("1xH200"), Layout(), rows), 0)
    assert sum(parts.values()) / 2**30 == pytest.approx(measured, rel=0.01)


def test_norms_save_the_input_of_the_first_block_if_the_embedding_is_trained() -> None:
    shape = shape_of_config(AutoConfig.for_model("llama", **PLAIN | GATED, num_hidden_layers=4).to_dict())
    work = TrainingWork(shape, 512, 8, tuning="lora")
    more = replace(work, adapters=Adapters(modules=("embed_tokens",)))

    def saved(work: TrainingWork, stage: int, **options: Any) -> float:
        layout = Layout(pipeline=2, **options)
        return stage_activations(Setting(work, load_cluster("2xH200"), layout, 1), stage).here

    in_float32 = 2 * 512 * 4 * shape.width  # of two micro-batches in flight
    assert saved(more, 0) - saved(work, 0) == in_float32
    assert saved(more, 1) == saved(work, 1)
    assert saved(more, 0, recompute="full") == saved(work, 0, recompute="full")


def test_matrices_of_a_quantised_base_are_unpacked_one_at_a_time_in_the_blocks_alone() -> None:
    shape = shape_of_config(AutoConfig.for_model("llama", **PLAIN | GATED, num_hidden_layers=2).to_dict())

    def unpacked(vocabulary: int) -> tuple[float, str]:
        of = replace(shape, vocabulary=vocabulary)
        work = TrainingWork(of, 4096, 1, precision="bf16", tuning="qlora")
        parts, moment = eager_parts(Setting(work, load_cluster("1xH200"), Layout(recompute="full"), 1), 0)
        return parts.get("unpacked weights", 0.0), moment

    assert unpacked(32000) == (0.0, "the last micro-batch's loss")
    assert unpacked(64) == (2 * 2048 * 5632, "the start of the backward pass")


def test_experts_of_a_base_in_4_bits_are_packed_and_unpacked_all_at_once() -> None:
    shape = shape_of_name("mixtral-8x7b", Path())

    def parts(**changes: Any) -> dict[str, float]:
        work = replace(TrainingWork(shape, 4096, 1, precision="bf16", tuning="lora"), **changes)
        return eager_parts(Setting(work, load_cluster("1xH200"), Layout(recompute="full"), 1), 0)[0]

    experts = 32 * 8 * 3 * 4096 * 14336
    bits, whole, eight = parts(tuning="qlora"), parts(), parts(quantise="8bit")
    dense = 32 * 4096 * (2 * 4096 + 2 * 1024)
    for found, packed, size in ((bits, experts + dense, PACKED_BYTES["4bit"]), (eight, dense, PACKED_BYTES["8bit"])):
        assert whole["weights"] - found["weights"] == pytest.approx((2 - size) * packed)
    assert bits["unpacked weights"] == 2 * 8 * 4096 * 2 * 14336
    trained = parts(tuning="qlora", adapters=Adapters(targets=("q_proj", "experts.down_proj")))
    assert trained["weights"] - bits["weights"] > 0.9 * (2 - PACKED_BYTES["4bit"]) * experts / 3


def _cluster(processes: int = 1) -> Cluster:
    return cluster_of(device_kind("cpu"), gpus=processes, per_node=processes)


def _setting(
    model: str, seq_len: int, batch: int, micro_batch: int, recompute: Any = "none", tuning: Any = "full", **layout: Any
) -> Setting:
    work = TrainingWork(shape_of_name(model, Path.cwd()), seq_len, batch, precision="fp32", tuning=tuning)
    parallel = Layout(recompute=recompute, **layout)
    return Setting(work, _cluster(parallel.world), parallel, micro_batch)


@pytest.mark.parametrize("row", MEASURED, ids=lambda row: f"{row[0]} {row[1]}x{row[3]} {row[4]} {row[5]}")
def test_the_largest_resident_size_of_real_runs(row: tuple[Any, ...]) -> None:
    *keys, measured = row
    assert stage_memory(_setting(*keys), 0).peak / 2**30 == pytest.approx(measured, rel=0.08)


def test_states_are_12_bytes_a_parameter_and_gradients_4_more_where_they_are_summed() -> None:
    one, two = (_setting("llama-30m", 512, batch, 1) for batch in (1, 4))
    count = one.shape.parameters
    alone, summed = stage_memory(one, 0).parts, stage_memory(two, 0).parts
    assert alone["weights"] + alone["optimizer"] == 12 * count
    assert summed["gradients"] == 4 * count
    assert alone["process"] == PROCESS


def test_adapters_have_gradients_and_states_of_their_own_alone() -> None:
    setting = _setting("smollm2-135m", 256, 2, 2, tuning="lora")
    adapters = lora_parameters(setting.shape, 16)
    parts = stage_memory(setting, 0).parts
    assert parts["optimizer"] == 8 * adapters
    assert parts["weights"] == 4 * (setting.shape.parameters + adapters)


def test_recompute_keeps_the_inputs_of_blocks_and_one_block() -> None:
    none, full = (stage_memory(_setting("llama-30m", 1024, 1, 1, which), 0) for which in ("none", "full"))
    assert full.peak < none.peak
    assert full.parts["activations"] < none.parts["activations"] / 4


@pytest.mark.parametrize("tied", [False, True])
def test_the_first_block_has_all_gradients_but_its_own_and_the_embeddings(tied: bool) -> None:
    shape = replace(_llama(256, (8, 8), 512), layers=48, vocabulary=1000, tied=tied)
    layout = Layout(recompute="full")
    setting = Setting(TrainingWork(shape, 2048, 1, precision="fp32"), load_cluster("1xH200"), layout, 1)
    parts, moment = eager_parts(setting, 0)
    block = shape.vectors(shape.layer(0)) + sum(m.parameters for m in shape.layer_matmuls(0))
    later = block if tied else block + shape.embedding_parameters  # a tied head has given the embedding's gradient
    assert moment == FIRST_BLOCK
    assert parts["gradients"] == 4 * (shape.parameters - later)


@pytest.mark.parametrize(("shard", "batch", "whole"), [("zero1", 8, True), ("zero1", 2, False), ("zero2", 8, False)])
def test_zero1_sums_whole_gradients_over_several_micro_batches(shard: Any, batch: int, whole: bool) -> None:
    layout = Layout(data=2, shard=shard, shard_size=2)
    work = TrainingWork(replace(_llama(2048, (32, 4), 5632), layers=8), 32, batch)
    parts, _ = eager_parts(Setting(work, load_cluster("2xH200"), layout, 1), 0)
    assert parts["gradients"] == 4 * work.shape.parameters / (1 if whole else 2)


def test_decoding_is_recorded_with_a_workspace_where_no_weight_is_cast() -> None:
    rollouts = RolloutSizes(4, 4, 64, 1, 2)

    def workspaces(tuning: Tuning, precision: str, cluster: str = "1xH200", **layout: Any) -> float:
        work = TrainingWork(PRETRAINED, 512, 8, precision=precision, tuning=tuning, rollouts=rollouts, scores=True)
        return eager_parts(Setting(work, load_cluster(cluster), Layout(**layout), 4), 0)[0]["workspaces"]

    assert workspaces("lora", "bf16") == workspaces("full", "fp32") == workspaces("full", "bf16") + 2**25 == 3 * 2**25
    assert workspaces("qlora", "bf16") == workspaces("lora", "bf16", "2xH200", tensor=2) == 2 * 2**25


def test_sharding_divides_states_but_not_what_a_process_takes() -> None:
    alone, spread = (_setting("llama-110m", 512, 4, 1, data=data, shard=shard, shard_size=data)
                     for data, shard in ((1, "none"), (4, "zero3")))  # fmt: skip
    whole, part = stage_memory(alone, 0).parts, stage_memory(spread, 0).parts
    assert part["optimizer"] == pytest.approx(whole["optimizer"] / 4)
    assert part["process"] == whole["process"]
    assert 0 < part["gathered weights"] < whole["weights"]


def test_the_upper_bound_is_above() -> None:
    memory = stage_memory(_setting("llama-10m", 512, 4, 4), 0)
    assert memory.upper > memory.peak
    assert replace(memory, parts={}).peak == 0


@pytest.mark.parametrize("layout", [{}, {"data": 2, "shard": "zero3", "shard_size": 2}], ids=["alone", "zero3"])
def test_each_process_holds_frozen_copies_whole_and_without_gradients(layout: dict[str, Any]) -> None:
    setting = _setting("llama-10m", 512, 4, 4, **layout)
    copies = replace(setting, work=replace(setting.work, resident=2))
    before, after = stage_memory(setting, 0).parts, stage_memory(copies, 0).parts
    assert after == {**before, "frozen copies": 2 * 4 * setting.shape.parameters}


def _llama(width: int, heads: tuple[int, int], mlp_width: int) -> Shape:
    sizes = {"hidden_size": width, "num_attention_heads": heads[0], "num_key_value_heads": heads[1]}
    sizes |= {"intermediate_size": mlp_width, "num_hidden_layers": 2, "vocab_size": 32000}
    return shape_of_config(sizes | {"model_type": "llama"})


PRETRAINED, TUNED = _llama(2048, (32, 4), 5632), _llama(4096, (32, 8), 14336)
# Largest sizes allocated in steps of CUDA's code, GiB (benchmarks/without_gpu, torch 2.11, 2026-11-27): a Llama of two
# blocks; tuning, precision, options of the layout, whether blocks are compiled.
ALLOCATED = (
    ("full", "bf16", {}, "never", 7.256),
    ("full", "bf16", {}, "always", 5.802),
    ("full", "fp8", {}, "always", 5.311),
    ("full", "bf16", {"offload": "activations"}, "always", 5.308),
    ("full", "bf16", {"recompute": "selective"}, "always", 5.044),
    ("lora", "bf16", {}, "always", 3.057),
)


@pytest.mark.parametrize(("tuning", "precision", "layout", "compiles", "measured"), ALLOCATED)
def test_the_largest_allocated_size_of_steps_on_a_gpu(
    tuning: Any, precision: str, layout: dict[str, Any], compiles: CompileChoice, measured: float
) -> None:
    shape, rows = (PRETRAINED, 4) if tuning == "full" else (TUNED, 1)
    work = TrainingWork(shape, 4096, 4 if tuning == "full" else 2, precision=precision, tuning=tuning)
    cluster = cluster_of(device_kind("h200"), gpus=1, per_node=1)
    setting = Setting(work, cluster, Layout(**layout), rows, software=replace(STOKER, compiles=compiles))
    assert stage_memory(setting, 0).peak / 2**30 == pytest.approx(measured, rel=0.02)
