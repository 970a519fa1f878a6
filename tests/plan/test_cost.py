"""What a run takes: tokens, hours, money and interruptions, against their definitions."""

from __future__ import annotations

from dataclasses import replace
from math import exp, log, sqrt
from pathlib import Path

import pytest
from counted import lora_parameters

from stoker.hardware.machines.cluster import Cluster
from stoker.hardware.machines.cluster_file import load_cluster
from stoker.job.layout import Layout
from stoker.job.load_job import load_job
from stoker.plan.answer.cost import SAMPLE_STEPS, Length, checkpoint_bytes, cost_of, price_of, saving_of
from stoker.plan.answer.explain import plan_of
from stoker.plan.memory.memory_formulas import stage_memory
from stoker.plan.search import LayoutPlan
from stoker.plan.setting import Setting, TrainingWork, Tuning
from stoker.plan.shapes.model_names import shape_named

LLAMA = shape_named("llama3-8b")


def plan_on(cluster: Cluster, tuning: Tuning = "full") -> LayoutPlan:
    work = TrainingWork(LLAMA, 2048, 4 * cluster.gpus, tuning=tuning)
    return plan_of(Setting(work, cluster, Layout(data=cluster.gpus, shard="zero3", shard_size=cluster.gpus), 2))


def test_speed_is_tokens_over_seconds_and_mfu_by_the_palm_convention() -> None:
    plan = plan_on(load_cluster("8xA100-80GB"))
    speed = plan.speed
    assert speed.tokens_per_s == pytest.approx(32 * 2048 / plan.seconds)
    assert speed.tokens_per_s_per_gpu == pytest.approx(speed.tokens_per_s / 8)
    flop = 6 * LLAMA.parameters + 12 * LLAMA.layers * LLAMA.heads * LLAMA.head_size * 2048
    assert speed.mfu == pytest.approx(speed.tokens_per_s_per_gpu * flop / 312e12)
    adapters = plan_on(load_cluster("8xA100-80GB"), "lora").speed
    less = flop - 2 * LLAMA.parameters
    assert adapters.mfu == pytest.approx(adapters.tokens_per_s_per_gpu * less / 312e12)


def test_both_rows_of_a_pair_count() -> None:
    plan = plan_on(load_cluster("8xA100-80GB"))
    work = replace(plan.setting.work, rows=2)
    pairs = plan_of(replace(plan.setting, work=work))
    assert pairs.speed.tokens_per_s == pytest.approx(2 * 32 * 2048 / pairs.seconds)
    assert pairs.speed.mfu == pytest.approx(plan.speed.mfu, rel=0.1)


def test_a_checkpoint_has_weights_and_two_moments_in_float32() -> None:
    """12 bytes a parameter; of adapters, of rank 16 on all linear layers, theirs alone."""
    cluster = load_cluster("8xA100-80GB")
    assert checkpoint_bytes(plan_on(cluster).setting) == 12 * LLAMA.parameters
    assert checkpoint_bytes(plan_on(cluster, "lora").setting) == 12 * lora_parameters(LLAMA, 16)


def test_power_sgd_keeps_an_error_of_each_parameter_in_every_process_and_its_checkpoint() -> None:
    setting = plan_on(load_cluster("8xA100-80GB")).setting
    plain = replace(setting, layout=Layout(data=8))
    compressed = replace(plain, layout=replace(plain.layout, compress="powersgd"))
    size = 4 * LLAMA.parameters
    before, after = stage_memory(plain, 0), stage_memory(compressed, 0)
    assert after.parts == {**before.parts, "compression error": size}
    assert after.upper - before.upper == pytest.approx(1.03 * size)  # its size is known
    assert checkpoint_bytes(compressed) - checkpoint_bytes(plain) == 8 * size


def test_a_checkpoint_pauses_training_for_the_copy_and_without_background_for_the_write() -> None:
    """About 8 x 12e9 bytes: each GPU copies an eighth at 32 GB/s, the node writes all of it at the cluster's rate."""
    cluster = replace(load_cluster("8xA100-80GB"), storage_gbs=4.0)
    setting, size = plan_on(cluster).setting, 12 * LLAMA.parameters
    copy, write = size / 8 / 32e9, size / 4e9
    saving = saving_of(setting, 1.0)
    assert (saving.stall, saving.write) == pytest.approx((copy, write))
    waits = saving_of(setting, 1.0, background=False)
    assert (waits.stall, waits.write) == (pytest.approx(copy + write), 0.0)
    two = saving_of(plan_on(cluster.with_nodes(2)).setting, 1.0)
    assert (two.stall, two.write) == pytest.approx((copy / 2, write / 2))


def test_the_job_says_whether_training_waits_for_the_write(tmp_path: Path) -> None:
    job = "task: sft\nmodel: llama-3m\ndata: rows.jsonl\nsteps: 9\n"
    (tmp_path / "job.yaml").write_text(job)
    (tmp_path / "waits.yaml").write_text(f"{job}checkpoint: {{background: false, every: 3}}\n")
    assert Length.of(load_job(tmp_path / "job.yaml").job).background
    length = Length.of(load_job(tmp_path / "waits.yaml").job)
    assert length == Length(9, None, 3, background=False)
    plan = plan_on(load_cluster("8xA100-80GB"))
    assert cost_of(plan, length).saving.write == 0 < cost_of(plan, replace(length, background=True)).saving.write


def test_a_clusters_file_says_the_rate_of_its_storage() -> None:
    assert load_cluster("{device: H100, storage_gbs: 7}").storage_gbs == 7.0


def test_a_run_without_failures_is_its_steps() -> None:
    cluster = replace(load_cluster("8xA100-80GB"), failures_per_gpu_hour=0.0, price_per_hour=20.0)
    plan = plan_on(cluster)
    cost = cost_of(plan, Length(5000))
    assert cost.known and cost.steps == 5000 and cost.tokens == 5000 * 32 * 2048
    assert cost.training == pytest.approx(5000 * plan.seconds)
    assert cost.forecast.interruptions == 0 and cost.forecast.chance == 0
    assert cost.price == pytest.approx(20.0 * cost.hours)
    assert cost.price_per_billion_tokens == pytest.approx(cost.price * 1e9 / cost.tokens)
    assert cost.hours == pytest.approx((5000 * plan.seconds + cost.saving.stall) / 3600)


def test_interruptions_follow_the_failure_rate() -> None:
    """99.9 % a month on 1,000 GPUs: about 63 % within a month; Young's interval to first order."""
    cluster = replace(load_cluster("125x8xA100-80GB"), failures_per_gpu_hour=-log(0.999) / 730.0)
    plan = plan_on(cluster)
    month = 730 * 3600
    cost = cost_of(plan, Length(round(month / plan.seconds), save_every=100_000))
    longer = cost.forecast.seconds / month
    assert cost.forecast.chance == pytest.approx(1 - exp(-1000 * 0.0010005 * longer), rel=1e-3)
    assert cost.forecast.chance == pytest.approx(0.63, abs=0.02)
    young = sqrt(2 * cost.saving.stall * cost.forecast.mean_between)
    assert cost.forecast.interval == pytest.approx(young, rel=0.05)
    assert cost.interval_steps == round(cost.forecast.interval / plan.seconds)
    assert cost.as_written is not None and cost.as_written.effective < cost.forecast.effective < 1


def test_a_length_that_hangs_on_the_data_is_given_for_a_thousand_steps() -> None:
    plan = plan_on(load_cluster("8xA100-80GB"))
    cost = cost_of(plan, Length(None, epochs=3))
    assert not cost.known and cost.steps == SAMPLE_STEPS and cost.price is None
    assert cost.price_per_billion_tokens is None
    assert cost.hours_per_billion_tokens == pytest.approx(cost.hours * 1e9 / (1000 * 32 * 2048))


def test_a_price_is_of_all_nodes() -> None:
    cluster = replace(load_cluster("4x8xH100"), price_per_hour=30.0)
    assert price_of(cluster, 7200.0) == pytest.approx(4 * 30 * 2)
    assert price_of(load_cluster("4x8xH100"), 7200.0) is None
    assert price_of(cluster, float("inf")) is None
