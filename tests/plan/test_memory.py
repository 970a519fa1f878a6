"""Memory against the figures of the papers, and by component."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stoker.hardware.cluster import cluster_of
from stoker.hardware.devices import device_kind
from stoker.job.layout import Layout, Shard
from stoker.plan.activations import in_flight, layer_activations
from stoker.plan.held import Held, held_parameters
from stoker.plan.memory import model_states, peak_memory, stage_memory
from stoker.plan.setting import Setting, Work
from stoker.plan.shape import Shape
from stoker.plan.shapes.names import shape_named
from stoker.plan.software import COMPOSER, MEGATRON_2021, NANOTRON, STOKER

GPT = Shape("gpt", 24, 1024, 16, 16, 64, 4096, 50257, norm_bias=True, qkv_bias=True, output_bias=True, mlp_bias=True)


def setting(shape: Shape, layout: Layout, **more: object) -> Setting:
    work = Work(shape, 1024, 64 * layout.data)
    cluster = cluster_of(device_kind("A100"), gpus=layout.world)
    return replace(Setting(work, cluster, layout, 1), **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(("shard", "gigabytes"), [("none", 120.0), ("zero1", 31.4), ("zero2", 16.6), ("zero3", 1.88)])
def test_zeros_own_figures(shard: Shard, gigabytes: float) -> None:
    """Rajbhandari et al., 2020, figure 1: 7.5 billion parameters, K = 12, 64 devices."""
    found = model_states(7.5e9, shard=shard, over=64, weights=2, gradients=2, states=12)
    assert found / 1e9 == pytest.approx(gigabytes, abs=0.05)


@pytest.mark.parametrize("shard", ["none", "zero1", "zero2", "zero3"])
def test_a_stages_states_are_zeros(shard: Shard) -> None:
    layout = Layout(data=8, shard=shard, shard_size=1 if shard == "none" else 8)
    parts = stage_memory(setting(GPT, layout, software=COMPOSER), 0).parts
    states = parts["weights"] + parts["gradients"] + parts["optimizer"]
    expected = model_states(GPT.parameters, shard=shard, over=8, weights=4, gradients=4, states=8)
    assert states == pytest.approx(expected)


@pytest.mark.parametrize(("tensor", "pipeline"), [(1, 1), (2, 1), (1, 4), (4, 2)])
def test_the_stages_hold_the_whole_model(tensor: int, pipeline: int) -> None:
    """Matrices once; vectors on every tensor-parallel process; a tied embedding on both ends of a pipeline."""
    found = setting(GPT, Layout(tensor=tensor, pipeline=pipeline))
    held = sum(held_parameters(found, stage).total for stage in range(pipeline)) * tensor
    vectors = sum(GPT.vectors(GPT.layer(i)) for i in range(GPT.layers)) + GPT.final_norm_parameters
    copies = GPT.vocabulary * GPT.width if pipeline > 1 else 0
    assert held == pytest.approx(GPT.parameters + vectors * (tensor - 1) + copies, rel=1e-9)


def test_experts_are_sharded_by_those_who_hold_the_same() -> None:
    assert Held(800.0, 800.0).share(8, expert=4) == 800 / 8 + 800 / 2


def test_activations_of_a_gpt_block() -> None:
    """Korthikanti et al., 2022, equation 1: s b h (34 + 5 a s / h), less the masks that fused dropout keeps as bits."""
    layout = Layout()
    found = layer_activations(setting(GPT, layout, software=MEGATRON_2021), GPT.layer(0))
    paper = GPT.width * (34 + 5 * GPT.heads * 1024 / GPT.width)
    assert found == pytest.approx(paper, rel=0.06)


def test_sequence_parallelism_splits_all_of_them() -> None:
    whole = layer_activations(setting(GPT, Layout()), GPT.layer(0))
    split = layer_activations(setting(GPT, Layout(tensor=4, sequence=True)), GPT.layer(0))
    without = layer_activations(setting(GPT, Layout(tensor=4)), GPT.layer(0))
    assert split == pytest.approx(whole / 4)
    assert split < without < whole


@pytest.mark.parametrize(
    ("schedule", "stage", "count", "expected"),
    [("1f1b", 0, 64, 4), ("1f1b", 3, 64, 1), ("1f1b", 0, 2, 2), ("gpipe", 3, 64, 64)],
)
def test_micro_batches_in_flight(schedule: str, stage: int, count: int, expected: float) -> None:
    found = setting(GPT, Layout(pipeline=4, schedule=schedule))  # type: ignore[arg-type]
    found = replace(found, work=replace(found.work, global_batch=count))
    assert in_flight(found, stage) == expected


def test_recomputation_keeps_a_blocks_input_only() -> None:
    none = stage_memory(setting(GPT, Layout(), software=COMPOSER), 0).parts["activations"]
    full = stage_memory(setting(GPT, Layout(recompute="full"), software=COMPOSER), 0).parts["activations"]
    block = layer_activations(setting(GPT, Layout(), software=COMPOSER), GPT.layer(0))
    assert none == pytest.approx(1024 * (24 * block + 3 * 2 * 1024))
    assert full == pytest.approx(1024 * (24 * 2 * 1024 + block + 3 * 2 * 1024))


def test_the_fullest_stage_is_found_among_all() -> None:
    shape = shape_named("llama3-8b")
    for software in (STOKER, NANOTRON):
        found = setting(shape, Layout(pipeline=8), software=software)
        assert peak_memory(found)[1].peak == max(stage_memory(found, stage).peak for stage in range(8))


def test_an_adapter_needs_no_states_of_the_base() -> None:
    shape = shape_named("llama3-8b")
    full = setting(shape, Layout())
    lora = replace(full, work=replace(full.work, tuning="lora"))
    quantised = replace(full, work=replace(full.work, tuning="qlora"))
    sizes = [
        sum(stage_memory(s, 0).parts[k] for k in ("weights", "gradients", "optimizer")) for s in (full, lora, quantised)
    ]
    assert sizes[0] == pytest.approx(16 * shape.parameters)
    assert sizes[1] == pytest.approx(2 * shape.parameters + 16 * shape.lora_parameters(16))
    outside = shape.parameters - shape.layers * sum(m.parameters for m in shape.layer_matmuls(0))
    packed = (0.5 + 1 / 64 + 4 / 64 / 256) * (shape.parameters - outside)  # bits, scales, and scales of those
    assert sizes[2] == pytest.approx(packed + 2 * outside + 16 * shape.lora_parameters(16))


def test_what_sequence_parallelism_gathers_is_whole_on_every_process() -> None:
    """Four tensors of a micro-batch at least, however many processes split the rest."""
    for tensor in (4, 16):
        kept = stage_memory(setting(GPT, Layout(tensor=tensor, sequence=True), software=COMPOSER), 0).parts[
            "activations"
        ]
        assert kept > 1024 * 4 * 2 * GPT.width
    spread = [
        stage_memory(setting(GPT, Layout(tensor=t, sequence=True), software=COMPOSER), 0).parts["activations"]
        for t in (4, 16)
    ]
    assert spread[1] > spread[0] / 4


def test_late_frees_take_no_more_than_the_room_there_is() -> None:
    found = setting(shape_named("llama3-8b"), Layout(tensor=8, sequence=True), software=NANOTRON)
    late = [stage_memory(replace(found, micro_batch=rows), 0).parts["freed late"] for rows in (1, 2, 64)]
    assert late[1] == pytest.approx(2 * late[0])
    assert late[2] == 0
    assert "freed late" not in stage_memory(replace(found, software=STOKER), 0).parts


def test_offloaded_parameters_leave_the_device() -> None:
    found = setting(shape_named("llama3-8b"), Layout(data=8, shard="zero3", shard_size=8))
    kept, moved = (stage_memory(replace(found, layout=replace(found.layout, offload=o)), 0) for o in ("none", "params"))
    assert moved.host == pytest.approx(sum(kept.parts[part] for part in ("weights", "gradients", "optimizer")))
    assert moved.peak == pytest.approx(kept.peak - moved.host)
