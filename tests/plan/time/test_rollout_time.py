"""The time of a round of answers: limits in which it is known, and what must make it longer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from stoker.hardware.machines.cluster import cluster_of
from stoker.hardware.machines.device_names import device_kind
from stoker.job.layout import Layout
from stoker.job.rollout_sizes import RolloutSizes
from stoker.plan.setting import Setting, TrainingWork
from stoker.plan.shapes.model_names import shape_named
from stoker.plan.shapes.shape_of_config import shape_of_config
from stoker.plan.software import STOKER
from stoker.plan.time.efficiency import Efficiency
from stoker.plan.time.rollout_time import LOGIT, ROWS_GPU, RolloutTime, rollouts_of
from stoker.plan.time.step_time import step_time

SHAPE = shape_named("llama3-8b")
WIRELESS = {"link": 1e9, "network": 1e9, "start": 0.0}  # collectives take no time
BOUND = Efficiency(1.0, 1.0, half_rows=0.0, half_width=0.0, attention=1.0, bandwidth=1.0, **WIRELESS)
FREE = replace(STOKER, launch=0.0, launch_tensor=0.0, traffic=0.0)
ALONE = Layout()
GBS = device_kind("A100").memory_gbs * 1e9


def time_of(layout: Layout = ALONE, *, readings: int = 0, micro_batch: int = 1, **sizes: Any) -> RolloutTime:
    asked = {"prompts": 1, "answers": 8, "tokens": 256, "epochs": 1, **sizes}
    work = TrainingWork(
        SHAPE, 1024, 8, precision="bf16", tuning="lora", rollouts=RolloutSizes(**asked, readings=readings)
    )
    cluster = cluster_of(device_kind("A100"), gpus=layout.world)
    found = rollouts_of(Setting(work, cluster, layout, micro_batch, software=FREE), BOUND)
    assert found is not None
    return found


@pytest.mark.parametrize("rows", [8, 64])
def test_a_few_rows_take_the_time_of_reading_weights_and_keys_and_values(rows: int) -> None:
    tokens, attended = 256, 1024 - 256 + 128
    weights = 2 * (sum(m.held for m in SHAPE.matmuls(SHAPE.layer(0))) * SHAPE.layers + SHAPE.head_matmul().held)
    kept = 2 * 2 * SHAPE.key_value_width * SHAPE.layers * rows * attended
    logits = LOGIT * rows * SHAPE.vocabulary
    assert time_of(answers=rows).decode == pytest.approx(tokens * (weights + kept + logits) / GBS, rel=0.01)


def test_many_rows_are_bound_by_arithmetic_and_more_than_a_step_holds_come_in_waves() -> None:
    few, full, twice = (time_of(answers=answers).decode for answers in (8, ROWS_GPU, 2 * ROWS_GPU))
    assert few < full < few * ROWS_GPU / 8
    assert twice == pytest.approx(2 * full)


def test_what_makes_it_longer() -> None:
    least = time_of()
    assert time_of(tokens=512).decode > 1.9 * least.decode
    assert time_of(prompts=4).prefill > 3.9 * least.prefill
    assert time_of(Layout(data=2), prompts=2).total == pytest.approx(least.total)  # each its own prompt
    assert time_of(Layout(tensor=2)).decode == pytest.approx(least.decode / 2, rel=0.05)
    assert time_of(Layout(data=2, shard="zero3", shard_size=2), prompts=2).total >= least.total
    assert least.scoring == 0
    assert time_of(readings=2).scoring == pytest.approx(2 * time_of(readings=1).scoring) != 0


def test_sharded_weights_are_gathered_in_float32_where_products_are() -> None:
    work = TrainingWork(SHAPE, 1024, 8, precision="fp32", rollouts=RolloutSizes(8, 1, 16, 1, 0))
    cluster = replace(cluster_of(device_kind("A100"), gpus=8), link_latency_s=0.0)
    decode = []
    for layout in (Layout(data=8), Layout(data=8, shard="zero3", shard_size=8)):
        found = rollouts_of(Setting(work, cluster, layout, 1, software=FREE), replace(BOUND, link=1.0))
        assert found is not None
        decode.append(found.decode)
    gathered = 4 * SHAPE.parameters * 7 / 8 / (cluster.device.link_gbs * 1e9)
    assert decode[1] - decode[0] == pytest.approx(16 * gathered)


def test_a_step_has_its_share() -> None:
    assert time_of(epochs=2).of_step == pytest.approx(time_of().total / 2)
    work = TrainingWork(SHAPE, 1024, 8, rollouts=RolloutSizes(1, 8, 256, 1, 1))
    setting = Setting(work, cluster_of(device_kind("A100"), gpus=1), Layout(), 1)
    without = step_time(replace(setting, work=replace(work, rollouts=None)))
    rollouts = rollouts_of(setting)
    assert rollouts is not None
    assert step_time(setting).total == pytest.approx(without.total + rollouts.total)


def test_the_length_of_prompts_is_that_of_the_data_where_it_is_known() -> None:
    work = TrainingWork(SHAPE, 1024, 8, rollouts=RolloutSizes(1, 8, 256, 1, 1))
    assert work.prompt_tokens == 768 and replace(work, prompt=30.5).prompt_tokens == 30.5


def test_linear_attention_reads_its_states_and_no_keys_and_values() -> None:
    shape = shape_of_config({"model_type": "qwen3_5_text", "num_hidden_layers": 4})  # one of them with attention
    sizes, cluster = RolloutSizes(1, 8, 256, 1, 0), cluster_of(device_kind("A100"), gpus=1)
    short, long = (
        rollouts_of(Setting(TrainingWork(shape, length, 8, rollouts=sizes), cluster, ALONE, 1, software=FREE), BOUND)
        for length in (1024, 9216)
    )
    assert short is not None and long is not None
    kept = 256 * 8 * 8192 * 2 * shape.key_value_width * 2 / GBS
    assert long.decode - short.decode == pytest.approx(kept, rel=1e-6)
