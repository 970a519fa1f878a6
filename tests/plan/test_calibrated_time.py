"""Passes from a calibration, against closed forms on machines that are made up."""

from __future__ import annotations

from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from counted import lora_parameters

from stoker.hardware.machines.cluster import cluster_of
from stoker.hardware.machines.cluster_file import load_cluster
from stoker.hardware.machines.device_names import device_kind
from stoker.hardware.measured.calibration import HEAD_SIZES, Calibration, Curve, MatmulTable
from stoker.hardware.processor import processor_name
from stoker.job.layout import Layout
from stoker.plan.answer.time_breakdown import CONTEXT, TENSOR, causes_of
from stoker.plan.planned_job import shape_of_name
from stoker.plan.search import search
from stoker.plan.setting import Setting, TrainingWork
from stoker.plan.shapes.shape_of_config import shape_of_config
from stoker.plan.time.block_collectives import block_collectives
from stoker.plan.time.calibrated_time import MeasuredPasses, measured_passes
from stoker.plan.time.efficiency import efficiency_of
from stoker.plan.time.pass_times import PassTimes, block_pass
from stoker.plan.time.step_time import data_parallel, step_time
from stoker.plan.trainable_params import Adapters

RATE = 1e11  # FLOP/s at every size
KINDS = ("copy", "add", "silu", "multiply", "dropout")
NEVER = 1e-30  # seconds


def _calibration(
    bandwidth: float, *, attention: float = NEVER, call: float = NEVER, precision: str = "fp32"
) -> Calibration:
    """A machine with one rate for all products, one bandwidth for all tensors."""
    sizes = (16, 4096)
    products = tuple(2 * m * n * k / RATE for m in sizes for n in sizes for k in sizes)
    curves = [Curve(kind, (1, 2**30), (1 / bandwidth, 2**30 / bandwidth)) for kind in KINDS]
    for way in ("attention", "attention-backward"):
        curves += [Curve(f"{way}-{size}", (256, 512), (attention, 4 * attention)) for size in HEAD_SIZES]
    curves += [Curve(way, (64,), (call,)) for way in ("forward", "backward")]
    table = MatmulTable(precision, sizes, products)
    return Calibration("2026-11-21", "m", "d", 1, "2.13", (table,), tuple(curves), call)


def _setting(model: str = "llama-30m", *, tuning: Any = "full", recompute: Any = "none", batch: int = 2) -> Setting:
    work = TrainingWork(shape_of_name(model, Path.cwd()), 512, batch, precision="fp32", tuning=tuning)
    return Setting(work, cluster_of(device_kind("cpu"), gpus=1, per_node=1), Layout(recompute=recompute), batch)


def _products(setting: Setting) -> float:
    """Seconds of a block's forward products."""
    layer = setting.shape.layer(0)
    return setting.tokens * sum(m.forward_flop for m in setting.shape.matmuls(layer)) / RATE


def test_products_alone_take_one_two_and_three_times_their_forward_pass() -> None:
    setting = _setting()
    block = MeasuredPasses(_calibration(1e30)).block_pass(setting, setting.shape.layer(0))
    once = _products(setting)
    assert block.parts == pytest.approx((once, once, once), rel=1e-6)
    again = _setting(recompute="full")
    recomputed = MeasuredPasses(_calibration(1e30)).block_pass(again, again.shape.layer(0))
    assert recomputed.total == pytest.approx(4 * once, rel=1e-6)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_recomputed_passes_repeat_their_exchanges(recompute: Any) -> None:
    calibration = _calibration(1e30)
    cluster = replace(cluster_of(device_kind("cpu"), gpus=2, per_node=2), calibration=calibration)
    setting = replace(_setting(), cluster=cluster, layout=Layout(tensor=2, recompute=recompute))
    layer, efficiency = setting.shape.layer(0), efficiency_of(cluster.device)
    alone, whole = (
        MeasuredPasses(calibration).block_pass(setting, layer),
        block_pass(setting, layer, efficiency),
    )
    forward, backward = block_collectives(setting, layer, efficiency)
    assert whole.forward - alone.forward == pytest.approx(forward) and forward > 0
    again = forward if recompute == "full" else 0.0
    assert whole.backward_input - alone.backward_input == pytest.approx(backward + again)


def test_adapters_save_the_gradients_of_the_weights_that_stay() -> None:
    setting = _setting(tuning="lora")
    block = MeasuredPasses(_calibration(1e30)).block_pass(setting, setting.shape.layer(0))
    adapters = 2 * setting.tokens * lora_parameters(setting.shape, 16) / setting.shape.layers / RATE
    assert block.forward == pytest.approx(_products(setting) + adapters, rel=1e-6)
    assert block.backward_weight == pytest.approx(adapters, rel=1e-6)


def test_the_rest_is_inverse_to_the_bandwidth() -> None:
    setting = _setting()
    slow, fast = (
        MeasuredPasses(_calibration(rate)).block_pass(setting, setting.shape.layer(0)).total - 3 * _products(setting)
        for rate in (1e10, 2e10)
    )
    assert slow == pytest.approx(2 * fast, rel=1e-6)
    # A block of a Llama moves some hundred times its hidden states, forward and backward.
    hidden = 4 * setting.tokens * setting.shape.width
    assert 80 < slow * 1e10 / hidden < 250


def test_attention_is_that_of_every_head_and_row() -> None:
    setting = _setting()
    with_it, without = (
        MeasuredPasses(_calibration(1e30, attention=seconds)).block_pass(setting, setting.shape.layer(0)).total
        for seconds in (1e-3, NEVER)
    )
    rows, heads = 2, setting.shape.heads
    assert with_it - without == pytest.approx(2 * rows * heads * 4e-3, rel=1e-3)
    pairs = replace(setting, micro_batch=1, work=replace(setting.work, rows=2, computed=1024.0))
    block = MeasuredPasses(_calibration(1e30, attention=1e-3)).block_pass(pairs, pairs.shape.layer(0))
    assert block.total == pytest.approx(with_it)


def test_attention_beyond_the_measured_rows_grows_with_their_square() -> None:
    calibration = _calibration(1e30, attention=1e-3)
    assert calibration.attention(64, 2048) == pytest.approx(16 * calibration.attention(64, 512))
    assert calibration.attention(96, 512, backward=True) == pytest.approx(4e-3)


def test_the_head_is_three_products_and_its_logits() -> None:
    setting = _setting()
    head = MeasuredPasses(_calibration(1e30)).head_pass(setting)
    once = setting.tokens * setting.shape.head_matmul().forward_flop / RATE
    assert head.total == pytest.approx(3 * once, rel=1e-6)
    frozen = _setting(tuning="lora")
    assert MeasuredPasses(_calibration(1e30)).head_pass(frozen).total == pytest.approx(2 * once, rel=1e-6)
    beside = replace(frozen, work=replace(frozen.work, adapters=Adapters(modules=("lm_head",))))
    assert MeasuredPasses(_calibration(1e30)).head_pass(beside).total == pytest.approx(3 * once, rel=1e-6)


def test_the_optimizer_moves_40_bytes_a_parameter() -> None:
    setting = _setting()
    seconds = MeasuredPasses(_calibration(1e10)).optimizer_seconds(setting)
    assert seconds == pytest.approx(40 * setting.shape.parameters / 1e10)


def test_calls_count_where_there_is_little_to_do() -> None:
    setting = _setting(batch=1)
    shape = replace(setting.shape, width=64, mlp_width=64)
    small = replace(setting, work=replace(setting.work, shape=shape))
    passes = MeasuredPasses(_calibration(1e30, call=1e-5))
    assert passes.block_pass(small, shape.layer(0)).total > 100 * 1e-5


def test_only_what_was_measured_and_only_stoker_is_timed_so() -> None:
    setting = _setting()
    assert measured_passes(setting) is None
    here = replace(setting, cluster=replace(setting.cluster, calibration=_calibration(1e10)))
    assert measured_passes(here) == MeasuredPasses(_calibration(1e10))
    assert measured_passes(replace(here, software=replace(here.software, name="another"))) is None
    assert measured_passes(replace(here, work=replace(here.work, precision="bf16"))) is None
    bare = replace(_calibration(1e10), curves=())
    assert measured_passes(replace(here, cluster=replace(here.cluster, calibration=bare))) is None


def test_a_calibration_file_decides_how_processes_share_the_work(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("STOKER_CACHE", str(tmp_path))
    monkeypatch.setattr("stoker.hardware.machines.detect_machine.available_cores", lambda: 2)
    monkeypatch.setattr("stoker.hardware.measured.calibration._torch_version", lambda: "2.13")
    work = TrainingWork(shape_of_name("llama-30m", Path.cwd()), 512, 16, precision="fp32")
    kinds = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")
    for collective, send, layout in ((50.0, 1e-6, Layout(pipeline=2)), (1e-6, 50.0, Layout(data=2))):
        made = _calibration(1e10)
        curves = [Curve(kind, (1024, 2**40), (collective, collective), 2) for kind in kinds]
        curves.append(Curve("send", (1024, 2**40), (send, send), 2))
        today = date.today().isoformat()
        replace(made, device=processor_name(), date=today).with_collectives(curves).save()
        cluster = load_cluster("2xcpu")
        assert cluster.measured_links == f"collectives inside a node are those measured between 2 processes on {today}"
        ddp = Setting(work, cluster, Layout(data=2), 8)
        seconds = data_parallel(ddp, PassTimes().stages(ddp), efficiency_of(cluster.device)).collectives
        assert [each.seconds for each in seconds] == [pytest.approx(collective)]  # one sum of all gradients
        assert step_time(ddp).parts["data parallel"] >= collective * (1 - ddp.software.hidden_most)
        passes = ddp.micro_batches * work.shape.layers
        # Two sums forward and two backward; keys and values are gathered, and their gradients scattered.
        for name, split, calls in ((TENSOR, Layout(tensor=2), 4), (CONTEXT, Layout(context=2), 2)):
            said = causes_of(Setting(work, cluster, split, 16))[name].seconds
            assert said == pytest.approx(calls * passes * collective, rel=1e-3)
        best = search(work, cluster, kept=1).plans[0].setting.layout
        assert (best.data, best.pipeline) == (layout.data, layout.pipeline)


def test_kept_passes_are_those_of_the_setting_s_own_types() -> None:
    """In bf16 norms give float32 without sharding, and 16 bits with it."""
    cluster = replace(cluster_of(device_kind("A100"), gpus=8), calibration=_calibration(1e9, precision="bf16"))
    plain = Setting(TrainingWork(shape_of_name("llama-30m", Path.cwd()), 512, 16), cluster, Layout(data=8), 1)
    zero3 = Layout(data=8, shard="zero3", shard_size=8)
    passes, seconds = PassTimes(), []
    for layout in (plain.layout, zero3, replace(zero3, offload="params")):
        found = replace(plain, layout=layout)
        assert step_time(found, passes=passes).total == step_time(found).total
        assert passes.least(plain) <= step_time(found).total
        seconds.append(step_time(found).parts["compute"])
    assert seconds[1] < 0.95 * seconds[0] and seconds[2] == seconds[0]


def test_the_code_of_linear_attention_on_a_cpu_adds_gradients_of_chunks_to_those_of_whole_documents() -> None:
    shape = shape_of_config({"model_type": "qwen3_5_text", "num_hidden_layers": 4})
    cluster = cluster_of(device_kind("cpu"), gpus=1, per_node=1)

    def passes(seq_len: int, bandwidth: float) -> tuple[float, float]:
        work = TrainingWork(shape, seq_len, 1, precision="fp32", tuning="lora")
        setting = Setting(work, cluster, Layout(), 1)
        return MeasuredPasses(_calibration(bandwidth))._attention(setting, shape.layer(0))

    one, twice = passes(2048, 1e30), passes(4096, 1e30)
    assert twice == pytest.approx((2 * one[0], 2 * one[1])) and one[1] == pytest.approx(2 * one[0])
    one, twice = passes(2048, 1e9), passes(4096, 1e9)
    assert twice[0] == pytest.approx(2 * one[0])
    assert twice[1] > 3 * one[1]
