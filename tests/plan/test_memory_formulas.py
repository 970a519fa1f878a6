"""Memory against the figures of the papers, and by component."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from counted import lora_parameters

from stoker.hardware.machines.cluster import cluster_of
from stoker.hardware.machines.device_names import device_kind
from stoker.job.layout import Layout, Offload
from stoker.plan.memory.memory_formulas import (
    OFFLOADED,
    Memory,
    allocatable_bytes,
    peak_memory,
    stage_memory,
    verdict_of,
)
from stoker.plan.memory.stoker_memory import stage_activations
from stoker.plan.param_placement import ParamPlacement, held_parameters
from stoker.plan.setting import PACKED_BYTES, Setting, TrainingWork
from stoker.plan.shape import Shape
from stoker.plan.shapes.model_names import shape_named
from stoker.plan.shapes.shape_of_config import shape_of_config

GPT = Shape("gpt", 24, 1024, 16, 16, 64, 4096, 50257, norm_bias=True, qkv_bias=True, output_bias=True, mlp_bias=True)


def setting(shape: Shape, layout: Layout, **more: object) -> Setting:
    work = TrainingWork(shape, 1024, 64 * layout.data)
    cluster = cluster_of(device_kind("A100"), gpus=layout.world)
    return replace(Setting(work, cluster, layout, 1), **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(("tensor", "pipeline"), [(1, 1), (2, 1), (1, 4), (4, 2)])
def test_the_stages_hold_the_whole_model(tensor: int, pipeline: int) -> None:
    """Matrices once; vectors on every tensor-parallel process; a tied embedding on both ends of a pipeline."""
    found = setting(GPT, Layout(tensor=tensor, pipeline=pipeline))
    held = sum(held_parameters(found, stage).total for stage in range(pipeline)) * tensor
    vectors = sum(GPT.vectors(GPT.layer(i)) for i in range(GPT.layers)) + GPT.final_norm_parameters
    copies = GPT.vocabulary * GPT.width if pipeline > 1 else 0
    assert held == pytest.approx(GPT.parameters + vectors * (tensor - 1) + copies, rel=1e-9)


def test_experts_are_sharded_by_those_who_hold_the_same() -> None:
    assert ParamPlacement(800.0, 800.0).share(8, expert=4) == 800 / 8 + 800 / 2


@pytest.mark.parametrize(
    ("schedule", "stage", "count", "expected"),
    [("1f1b", 0, 64, 4), ("1f1b", 3, 64, 1), ("1f1b", 0, 2, 2), ("gpipe", 3, 64, 64)],
)
def test_micro_batches_in_flight(schedule: str, stage: int, count: int, expected: float) -> None:
    found = setting(GPT, Layout(pipeline=4, schedule=schedule))  # type: ignore[arg-type]
    found = replace(found, work=replace(found.work, global_batch=count))
    assert found.in_flight(stage) == expected


def test_the_fullest_stage_is_found_among_all() -> None:
    shape = shape_named("llama3-8b")
    found = setting(shape, Layout(pipeline=8))
    assert peak_memory(found)[1].peak == max(stage_memory(found, stage).peak for stage in range(8))


def test_a_stage_in_the_middle_may_be_the_fullest() -> None:
    """Experts in the two middle quarters, whose blocks have several times as many weights as the others."""
    outside = [*range(2), *range(6, 8)]
    shape = shape_of_config({"model_type": "qwen3_moe", "num_hidden_layers": 8, "mlp_only_layers": outside})
    found = setting(shape, Layout(pipeline=4))
    peaks = [stage_memory(found, stage).peak for stage in range(4)]
    assert peak_memory(found)[1].peak == max(peaks) == max(peaks[1:3]) > 2 * max(peaks[0], peaks[3])


def test_programs_have_the_memory_of_a_device_without_its_context() -> None:
    gpu, cpu = (cluster_of(device_kind(name), gpus=1, per_node=1) for name in ("A100", "cpu"))
    assert allocatable_bytes(gpu) == gpu.device.memory_gib * 2**30 - 1.5 * 2**30
    assert allocatable_bytes(cpu) == cpu.device.memory_gib * 2**30


def test_an_adapter_needs_no_states_of_the_base() -> None:
    shape = shape_named("llama3-8b")
    full = setting(shape, Layout())
    lora = replace(full, work=replace(full.work, tuning="lora"))
    quantised = replace(full, work=replace(full.work, tuning="qlora"))
    sizes = [
        sum(stage_memory(s, 0).parts[k] for k in ("weights", "gradients", "optimizer")) for s in (full, lora, quantised)
    ]
    assert sizes[0] == pytest.approx(16 * shape.parameters)
    assert sizes[1] == pytest.approx(2 * shape.parameters + 16 * lora_parameters(shape, 16))
    outside = shape.parameters - shape.layers * sum(m.parameters for m in shape.layer_matmuls(0))
    packed = (0.5 + 1 / 64 + 4 / 64 / 256) * (shape.parameters - outside)  # bits, scales, and scales of those
    assert sizes[2] == pytest.approx(packed + 2 * outside + 16 * lora_parameters(shape, 16))


def offloaded(found: Setting, *kinds: Offload) -> list[Memory]:
    return [stage_memory(replace(found, layout=replace(found.layout, offload=kind)), 0) for kind in kinds]


def test_offloaded_parameters_leave_the_device() -> None:
    found = setting(shape_named("llama3-8b"), Layout(data=8, shard="zero3", shard_size=8))
    found = replace(found, work=replace(found.work, precision="fp32"))
    kept, moved = offloaded(found, "none", "params")
    assert moved.host == pytest.approx(sum(kept.parts[part] for part in ("weights", "gradients", "optimizer")))
    assert moved.peak == pytest.approx(kept.peak - moved.host)


def test_offloaded_parameters_are_gathered_in_float32_and_computed_with_under_autocast() -> None:
    found = setting(shape_named("llama3-8b"), Layout(data=8, shard="zero3", shard_size=8))
    kept, moved = offloaded(found, "none", "params")
    assert moved.parts["gathered weights"] == 2 * kept.parts["gathered weights"]
    alone = stage_memory(replace(found, layout=Layout()), 0)
    assert moved.parts["activations"] == alone.parts["activations"]
    lora = replace(found, work=replace(found.work, tuning="lora"))  # its base is held in 16 bits
    kept, moved = offloaded(lora, "none", "params")
    assert moved.parts["gathered weights"] == kept.parts["gathered weights"]


def test_offloaded_activations_leave_two_blocks_on_the_device() -> None:
    found = setting(shape_named("llama3-8b"), Layout(data=8, shard="zero3", shard_size=8))
    moved = replace(found, layout=replace(found.layout, offload="activations"))
    kept, left = stage_activations(found, 0).here, stage_activations(moved, 0)
    block = kept / found.shape.layers
    assert left.here == pytest.approx(2 * block)
    assert left.before == pytest.approx(block)  # until the backward pass fetches another one
    assert stage_memory(moved, 0).host == left.on_host == pytest.approx(kept - block)


def test_an_offloaded_optimizer_keeps_weights_and_gradients_on_the_host_too() -> None:
    """AdamW in float32: two moments, the weights that it steps, and the gradients that it reads (`HostOptimizer`)."""
    found = setting(shape_named("llama3-8b"), Layout(data=8, shard="zero3", shard_size=8))
    kept, moved = offloaded(found, "none", "optimizer")
    assert moved.host == pytest.approx(2 * kept.parts["optimizer"]) == pytest.approx(16 * found.shape.parameters / 8)
    assert moved.peak == pytest.approx(kept.peak - kept.parts["optimizer"])


@pytest.mark.parametrize("kind", ["optimizer", "params", "activations"])
def test_offloading_frees_no_memory_of_a_processor(kind: Offload) -> None:
    found = setting(shape_named("llama3-8b"), Layout(data=2, shard="zero3", shard_size=2))
    kept, moved = offloaded(replace(found, cluster=cluster_of(device_kind("cpu"), gpus=2)), "none", kind)
    assert moved.host == 0
    assert moved.peak >= kept.peak and moved.upper >= kept.upper
    assert set(OFFLOADED[kind]) - {"outer step"} <= set(moved.parts)


def test_the_outer_step_of_islands_stays_beside_the_weights() -> None:
    found = setting(shape_named("llama3-8b"), Layout(data=8, shard="zero3", shard_size=8))
    found = replace(found, software=replace(found.software, outer=8))
    kept, states, parameters = offloaded(found, "none", "optimizer", "params")
    assert kept.parts["outer step"] == states.parts["outer step"] == kept.parts["optimizer"]
    assert "outer step" not in parameters.parts
    assert parameters.host == pytest.approx(
        sum(kept.parts[p] for p in ("weights", "gradients", "optimizer", "outer step"))
    )


def test_a_pipelines_stages_are_gathered_whole() -> None:
    """`PipelineStage` keeps FSDP from resharding after the backward pass of a micro-batch."""
    for shard in ("zero2", "zero3"):
        found = setting(GPT, Layout(data=8, pipeline=4, shard=shard, shard_size=8))
        assert stage_memory(found, 0).parts["gathered weights"] == 2 * held_parameters(found, 0).total


@pytest.mark.parametrize(("tensor", "prefetch"), [(1, 1), (2, 0)])
def test_zero3_gathers_blocks_and_the_largest_layer_outside(tensor: int, prefetch: int) -> None:
    shape = replace(shape_named("llama3-8b"), vocabulary=9000)
    found = setting(shape, Layout(data=8, shard="zero3", shard_size=8, tensor=tensor, prefetch=prefetch))

    def gathered(**work: Any) -> float:
        return stage_memory(replace(found, work=replace(found.work, **work)), 0).parts["gathered weights"]

    products = sum(m.parameters for m in shape.layer_matmuls(0))
    norms, outside = 2 * shape.width, 2 * 9000 * shape.width / tensor
    assert gathered() == 2 * (1 + prefetch) * (products / tensor + norms) + outside
    assert gathered(tuning="qlora") == (1 + prefetch) * (PACKED_BYTES["4bit"] * products / tensor + 2 * norms) + outside
    assert gathered(tuning="lora", quantise="8bit") == 2 * (1 + prefetch) * norms + outside  # each process has them
    one = replace(shape, positions=9000)  # the embedding of positions is beside that of tokens, the head alone
    largest = 2 * (9000 + 9000) * shape.width / tensor
    assert gathered(shape=one) == 2 * (1 + prefetch) * (products / tensor + norms) + largest


def test_verdicts_come_from_the_bound() -> None:
    found = [verdict_of(1.0, 1.1, capacity) for capacity in (1.2, 1.1, 1.05, 1.0, 0.9)]
    assert found == ["FITS", "FITS", "AT RISK", "AT RISK", "DOES NOT FIT"]
    assert Memory({"optimizer": 80.0, "weights": 20.0, "activations": 10.0}).upper == pytest.approx(103 + 12)
