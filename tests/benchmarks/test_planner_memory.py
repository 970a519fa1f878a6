"""Memory of programs with fused kernels, against the figures of the papers, and by component."""

from __future__ import annotations

from dataclasses import replace

import pytest
from planner_runs.memory import layer_activations
from planner_runs.programs import COMPOSER, MEGATRON_2021, NANOTRON

from stoker.hardware.machines.cluster import cluster_of
from stoker.hardware.machines.device_names import device_kind
from stoker.job.layout import Layout, Shard
from stoker.plan.memory.memory_formulas import peak_memory, stage_memory
from stoker.plan.setting import Setting, TrainingWork
from stoker.plan.shape import Shape
from stoker.plan.shapes.model_names import shape_named
from stoker.plan.software import STOKER

GPT = Shape("gpt", 24, 1024, 16, 16, 64, 4096, 50257, norm_bias=True, qkv_bias=True, output_bias=True, mlp_bias=True)


def setting(shape: Shape, layout: Layout, **more: object) -> Setting:
    work = TrainingWork(shape, 1024, 64 * layout.data)
    cluster = cluster_of(device_kind("A100"), gpus=layout.world)
    return replace(Setting(work, cluster, layout, 1, software=COMPOSER), **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("shard", ["none", "zero1", "zero2", "zero3"])
def test_a_stages_states_are_zeros(shard: Shard) -> None:
    layout = Layout(data=8, shard=shard, shard_size=1 if shard == "none" else 8)
    parts = stage_memory(setting(GPT, layout, software=COMPOSER), 0).parts
    states = parts["weights"] + parts["gradients"] + parts["optimizer"]
    kinds = zip((4, 4, 8), ("zero3", "zero2", "zero1"), strict=True)  # bytes, and what shards them
    expected = sum(GPT.parameters * size / (8 if shard >= least else 1) for size, least in kinds)
    assert states == pytest.approx(expected)


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


def test_recomputation_keeps_a_blocks_input_only() -> None:
    none = stage_memory(setting(GPT, Layout(), software=COMPOSER), 0).parts["activations"]
    full = stage_memory(setting(GPT, Layout(recompute="full"), software=COMPOSER), 0).parts["activations"]
    block = layer_activations(setting(GPT, Layout(), software=COMPOSER), GPT.layer(0))
    assert none == pytest.approx(1024 * (24 * block + 3 * 2 * 1024))
    assert full == pytest.approx(1024 * (24 * 2 * 1024 + block + 3 * 2 * 1024))


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


def test_late_frees_end_with_the_queue_of_launches() -> None:
    """24 blocks' two whole tensors at most; across nodes those of p - 2 of the p micro-batches of a first stage."""
    shape = shape_named("llama3-8b")
    whole = 2 * 1024 * shape.width
    one = setting(shape, Layout(tensor=8, sequence=True), software=NANOTRON)
    assert stage_memory(one, 0).parts["freed late"] == 24 * 2 * whole
    stages = setting(shape, Layout(tensor=4, sequence=True, pipeline=4), software=NANOTRON)
    assert stage_memory(stages, 0).parts["freed late"] == 2 * sum(stages.blocks[0].values()) * 2 * whole
    assert (
        stage_memory(setting(shape, Layout(tensor=4, sequence=True, pipeline=2), software=NANOTRON), 0).parts[
            "freed late"
        ]
        == 24 * 2 * whole
    )  # on one node the device is always behind


def test_the_fullest_stage_is_found_among_all() -> None:
    shape = shape_named("llama3-8b")
    found = setting(shape, Layout(pipeline=8), software=NANOTRON)
    assert peak_memory(found)[1].peak == max(stage_memory(found, stage).peak for stage in range(8))
