"""Step time: limits in which it is known, and what must make it longer."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest
from counted import forward_flop_per_token

from stoker.hardware.machines.cluster import Cluster, cluster_of
from stoker.hardware.machines.device_names import device_kind
from stoker.hardware.machines.network import parse_network
from stoker.job.layout import Compress, Layout, Recompute
from stoker.plan.answer.time_breakdown import causes_of
from stoker.plan.setting import Setting, TrainingWork
from stoker.plan.shape import Layer
from stoker.plan.shapes.model_names import shape_named
from stoker.plan.shapes.shape_of_config import shape_of_config
from stoker.plan.software import STOKER
from stoker.plan.time.efficiency import Efficiency, efficiency_of, matmul_seconds
from stoker.plan.time.gradient_traffic import gradient_traffic
from stoker.plan.time.network_cost import CollectiveGroup, collective_seconds
from stoker.plan.time.pass_times import PassTimes, block_pass, head_pass
from stoker.plan.time.step_time import step_time
from stoker.plan.trainable_params import PLAIN, Adapters

SHAPE = shape_named("llama3-8b")
CLUSTER = cluster_of(device_kind("A100"), gpus=64)
PERFECT = Efficiency(
    *(1.0, 1.0), half_rows=0.0, half_width=0.0, attention=1.0, bandwidth=1e9, link=1e9, network=1e9, start=0.0
)
FREE = replace(STOKER, launch=0.0, launch_tensor=0.0)


def setting(layout: Layout, *, micro_batch: int = 1, cluster: Cluster = CLUSTER) -> Setting:
    return Setting(TrainingWork(SHAPE, 4096, 64), cluster, layout, micro_batch, software=FREE)


def test_at_best_it_is_the_arithmetic() -> None:
    """Nothing but products at the peak: FLOP over peak, where attention's backward pass has five products for two."""
    found = step_time(setting(Layout(data=64)), PERFECT).total
    flop = 3 * forward_flop_per_token(SHAPE, seq_len=4096, causal=True) * 4096
    assert found == pytest.approx(flop / 312e12, rel=0.02)


def test_passes_without_gradients_take_the_time_of_forward_passes() -> None:
    """A reference reads what is trained on, such as that of `dpo`."""
    without, once, twice = (
        step_time(replace(found, work=replace(found.work, reads=reads)), PERFECT).total
        for found in [setting(Layout(data=64))]
        for reads in range(3)
    )
    forward = forward_flop_per_token(SHAPE, seq_len=4096, causal=True) * 4096 / 312e12
    assert [once - without, twice - once] == pytest.approx([forward] * 2, rel=0.02)


def test_the_head_is_divided_by_the_vocabulary() -> None:
    of = Efficiency(half_rows=0.0, half_width=0.0)
    whole, half = (head_pass(setting(layout), of) for layout in (Layout(data=64), Layout(data=32, tensor=2)))
    assert half.parts == pytest.approx([part / 2 for part in whole.parts])


def test_attention_is_divided_by_its_heads_of_keys_at_most() -> None:
    """Of 16 processes that share eight heads of keys, each two have the same ones; the MLP is divided by 16."""
    free = replace(CLUSTER, link_latency_s=0.0, network_latency_s=0.0)
    eight, sixteen = (
        block_pass(setting(Layout(tensor=tensor), cluster=free), SHAPE.layer(0), PERFECT).forward for tensor in (8, 16)
    )
    mlp = 4096 * 2 * 3 * 4096 * 14336 / 312e12
    assert eight - sixteen == pytest.approx(mlp / 16, rel=1e-3)


@pytest.mark.parametrize(("name", "tied"), [("lm_head", False), ("lm_head", True), ("embed_tokens", True)])
def test_a_head_that_is_trained_beside_adapters_has_a_gradient(name: str, tied: bool) -> None:
    full = TrainingWork(replace(SHAPE, tied=tied), 4096, 64)
    works = (full, *(replace(full, tuning="lora", adapters=each) for each in (Adapters(modules=(name,)), PLAIN)))
    whole, beside, frozen = (head_pass(replace(setting(Layout(data=64)), work=work), PERFECT) for work in works)
    assert beside == whole
    assert frozen.backward_weight == 0 < beside.backward_weight


def test_log_probabilities_under_a_trained_head_cost_its_products_again() -> None:
    of_all, of_adapters = TrainingWork(SHAPE, 4096, 64), TrainingWork(SHAPE, 4096, 64, tuning="lora")
    works = (of_all, replace(of_all, scores=True), of_adapters, replace(of_adapters, scores=True))
    full, scored, lora, scored_lora = (head_pass(replace(setting(Layout(data=64)), work=w), PERFECT) for w in works)
    assert scored.backward_input - full.backward_input == pytest.approx(full.backward_weight)
    assert scored_lora == lora


@pytest.mark.parametrize(("recompute", "backward"), [("none", 1), ("full", 2), ("selective", 1.5)])
def test_weights_in_4_bits_are_unpacked_once_in_each_pass(recompute: Recompute, backward: float) -> None:
    lora, qlora = (
        block_pass(
            replace(setting(Layout(data=64, recompute=recompute)), work=TrainingWork(SHAPE, 4096, 64, tuning=tune)),
            SHAPE.layer(0),
            replace(PERFECT, bandwidth=1.0),
        )
        for tune in ("lora", "qlora")
    )
    unpacking = qlora.forward - lora.forward
    assert unpacking > 0
    assert qlora.backward_input - lora.backward_input == pytest.approx(backward * unpacking)


@pytest.mark.parametrize("pipeline", [2, 4, 8])
def test_the_bubble(pipeline: int) -> None:
    """(K - 1) / (K + M - 1) of the time, where stages are equal and nothing else takes time."""
    shape = replace(SHAPE, vocabulary=1)
    found = replace(setting(Layout(data=64 // pipeline, pipeline=pipeline)), work=TrainingWork(shape, 4096, 1024))
    parts = step_time(found, PERFECT).parts
    count = found.micro_batches
    expected = (pipeline - 1) / (pipeline + count - 1)
    assert parts["bubble"] / (parts["bubble"] + parts["compute"]) == pytest.approx(expected, rel=1e-3)


def test_small_products_are_slower() -> None:
    of = Efficiency(half_rows=300.0, half_width=100.0)
    rates = [r / matmul_seconds(r, rows=r, inputs=1e9, outputs=1e9, peak=1.0, of=of) for r in (30.0, 300.0, 30000.0)]
    assert rates[0] < rates[1] < rates[2] < 1
    assert rates[1] == pytest.approx(0.5)
    assert matmul_seconds(1.0, rows=1e9, inputs=100, outputs=1e9, peak=1.0, of=of) == pytest.approx(2.0)
    assert matmul_seconds(1.0, rows=1e9, inputs=1e9, outputs=100, peak=1.0, of=of) == pytest.approx(2.0)


def test_a_board_with_an_eighth_of_the_power_computes_at_half_the_clock() -> None:
    device = device_kind("H100")
    whole, less = (efficiency_of(replace(device, power=power)) for power in (1.0, 1 / 8))
    for name in ("matmul", "low_matmul", "fp4_matmul", "attention"):
        assert getattr(less, name) == pytest.approx(getattr(whole, name) / 2)
    assert (less.bandwidth, less.link, less.half_rows) == (whole.bandwidth, whole.link, whole.half_rows)


def test_a_ring_through_nodes_is_as_fast_as_their_network() -> None:
    efficiency = Efficiency(link=1.0, network=1.0, start=0.0)
    free = replace(CLUSTER, link_latency_s=0.0, network_latency_s=0.0)
    inside = collective_seconds("all-reduce", 1e9, CollectiveGroup(8, 1), free, efficiency)
    assert inside == pytest.approx(2 * 7 / 8 * 1e9 / (free.device.link_gbs * 1e9))
    across = collective_seconds("all-reduce", 1e9, CollectiveGroup(64, 1), free, efficiency)
    assert across == pytest.approx(2 * 63 / 64 * 1e9 / (free.network_gbs * 1e9))
    # Eight groups, one of each device of a node, share its network.
    shared = collective_seconds("all-reduce", 1e9, CollectiveGroup(8, 8), free, efficiency)
    assert shared == pytest.approx(8 * 2 * 7 / 8 * 1e9 / (free.network_gbs * 1e9))
    assert collective_seconds("all-reduce", 1e9, CollectiveGroup(1, 1), free, efficiency) == 0


def test_what_costs_time() -> None:
    base = step_time(setting(Layout(data=64, shard="zero1", shard_size=64))).total
    assert step_time(setting(Layout(data=64, shard="zero1", shard_size=64, recompute="full"))).total > base * 1.2
    assert step_time(setting(Layout(data=64, shard="zero3", shard_size=64))).total > base
    assert step_time(setting(Layout(data=64, shard="zero1", shard_size=64, offload="optimizer"))).total > base
    moved = setting(Layout(data=64, shard="zero1", shard_size=64, offload="activations"))
    slow_link = replace(moved.cluster.device, host_gbs=moved.cluster.device.host_gbs / 100)
    late = replace(moved, cluster=replace(moved.cluster, device=slow_link))
    assert step_time(late).total > step_time(moved).total >= base
    near = step_time(setting(Layout(data=64, shard="zero3", shard_size=8))).total
    slow = replace(CLUSTER, network_gbs=CLUSTER.network_gbs / 100)
    far = step_time(setting(Layout(data=64, shard="zero3", shard_size=64), cluster=slow)).total
    assert far > near


def slow_link(found: Setting, gbs: float) -> Setting:
    """A setting on devices with another link to their host."""
    return replace(found, cluster=replace(CLUSTER, device=replace(CLUSTER.device, host_gbs=gbs)))


def test_copies_of_activations_are_seen_where_they_take_longer_than_both_passes() -> None:
    found = setting(Layout(data=64, shard="zero1", shard_size=64, offload="activations"))
    parts = [step_time(slow_link(found, gbs), PERFECT).parts for gbs in (0.2, 0.1)]
    away, back = (each["activation copies"] + each["compute"] for each in parts)
    assert back == pytest.approx(2 * away) and parts[0]["activation copies"] > parts[0]["compute"]


def test_weights_on_the_host_are_fetched_twice_for_every_micro_batch() -> None:
    layout = Layout(data=8, shard="zero3", shard_size=8, offload="params")
    one, four = (replace(slow_link(setting(layout), 0.1), work=TrainingWork(SHAPE, 4096, batch)) for batch in (8, 32))
    seconds = [step_time(each, PERFECT).parts["optimizer"] for each in (one, four)]
    fetched = 2 * 4 * SHAPE.parameters / 8 / 0.1e9  # in float32, forward and backward
    assert seconds[1] - seconds[0] == pytest.approx(3 * fetched, rel=1e-6)


def test_passes_that_are_kept_change_nothing() -> None:
    passes = PassTimes()
    for layout in (Layout(data=64), Layout(data=32, tensor=2), Layout(data=16, pipeline=4), Layout(data=32, context=2)):
        assert step_time(setting(layout), passes=passes).total == step_time(setting(layout)).total
        assert passes.least(setting(layout)) <= step_time(setting(layout)).total


def test_passes_that_are_kept_are_those_of_as_many_experts() -> None:
    work, passes = TrainingWork(shape_named("qwen3-30b-a3b"), 4096, 64), PassTimes()
    for expert in (1, 8, 64):
        found = Setting(work, CLUSTER, Layout(data=64), 1, expert=expert)
        assert step_time(found, passes=passes).total == step_time(found).total


def test_collectives_are_hidden_while_the_host_launches() -> None:
    """A host that takes a second a block leaves the time for what its processes exchange."""
    ratios = []
    for launch in (0.0, 1.0):
        found = replace(setting(Layout(data=32, tensor=2)), software=replace(FREE, launch=launch))
        without = replace(found, software=replace(found.software, hidden_tensor=1.0))
        ratios.append(step_time(found).total / step_time(without).total)
    assert ratios[0] > 1.01 and ratios[1] == pytest.approx(1, abs=1e-4)


def test_sequence_parallelism_gathers_and_scatters() -> None:
    """On EFA a gather and a scatter take about twice as long as one all-reduce of the same bytes."""
    cluster = cluster_of(device_kind("H100"), gpus=16, network=parse_network("EFA", device_kind("H100")))
    seconds = []
    for sequence in (False, True):
        found = setting(Layout(tensor=16, sequence=sequence), micro_batch=32, cluster=cluster)
        without = replace(found, software=replace(found.software, hidden_tensor=1.0))
        seconds.append(step_time(found).total - step_time(without).total)
    assert 1.5 < seconds[1] / seconds[0] < 3


def test_gathers_travel_beside_the_passes() -> None:
    """What blocks of FSDP exchange is seen only as far as it is longer than the passes, or first and last."""
    whole = setting(Layout(data=64, shard="zero3", shard_size=64), micro_batch=1)
    slow = replace(whole, cluster=replace(CLUSTER, network_gbs=CLUSTER.network_gbs / 50))
    exposed = [step_time(s).parts["data parallel"] for s in (whole, slow)]
    moved = [
        step_time(replace(s, software=replace(s.software, hidden=0.0))).parts["data parallel"] for s in (whole, slow)
    ]
    assert exposed[0] == pytest.approx((1 - whole.software.hidden_most) * moved[0])
    assert exposed[1] == pytest.approx(moved[1] - slow.software.hidden * step_time(slow).parts["compute"], rel=1e-6)


@pytest.mark.parametrize(("compress", "size"), [("none", 4), ("bf16", 2)])
def test_gradients_are_sent_in_float32_unless_they_are_compressed(compress: Compress, size: int) -> None:
    found = setting(Layout(data=64, compress=compress))
    (sent,) = gradient_traffic(found, PERFECT, compute=1.0, last=1.0).collectives
    every = CollectiveGroup(64, 1)
    assert sent.seconds == collective_seconds("all-reduce", size * SHAPE.parameters, every, CLUSTER, PERFECT)


def test_experts_are_not_computed_in_8_bits() -> None:
    """`stoker.parallel.float8` converts linear layers; stacked experts and routers stay in 16 bits."""
    seconds = {}
    for model in ("qwen3-30b-a3b", "llama3-8b"):
        for precision in ("bf16", "fp8"):
            work = TrainingWork(shape_named(model), 4096, 64, precision=precision)
            found = Setting(work, cluster_of(device_kind("H100"), gpus=64), Layout(data=64), 1, software=FREE)
            seconds[model, precision] = step_time(found, PERFECT).parts["compute"]
    assert seconds["llama3-8b", "fp8"] < 0.6 * seconds["llama3-8b", "bf16"]
    assert 0.7 * seconds["qwen3-30b-a3b", "bf16"] < seconds["qwen3-30b-a3b", "fp8"] < seconds["qwen3-30b-a3b", "bf16"]


def test_islands_pay_for_the_network_between_them_now_and_then() -> None:
    real = Efficiency()
    every_step = step_time(setting(Layout(data=64)), real).total
    near = step_time(setting(Layout(data=64, islands=8, sync_every=1000)), real).total
    own = setting(Layout(data=8), cluster=cluster_of(device_kind("A100"), gpus=8))
    alone = step_time(replace(own, work=TrainingWork(SHAPE, 4096, 8)), real).total
    assert near < every_step
    assert near == pytest.approx(alone, rel=0.05)
    often, seldom = (step_time(setting(Layout(data=64, islands=8, sync_every=n)), real).total - alone for n in (10, 20))
    assert often == pytest.approx(2 * seldom, rel=0.1)


def test_blocks_are_compiled_in_some_layouts_of_a_search_and_not_in_others() -> None:
    """Each with its own passes, whichever came first; with adapters and on other devices never."""
    measured = replace(STOKER, compiles="measured")
    whole, split = (
        replace(setting(layout), software=measured) for layout in (Layout(data=64), Layout(data=32, pipeline=2))
    )
    alone = [step_time(found).total for found in (whole, split)]
    for order in ((0, 1), (1, 0)):
        passes = PassTimes()
        assert [step_time((whole, split)[i], passes=passes).total for i in order] == [alone[i] for i in order]
    assert whole.compiled and not split.compiled
    assert not replace(whole, work=replace(whole.work, tuning="lora")).compiled
    assert not replace(whole, cluster=cluster_of(device_kind("MI300X"), gpus=64)).compiled


def test_compiled_blocks_repeat_no_product_in_a_selective_recompute() -> None:
    plain, selective, full = (
        step_time(replace(setting(Layout(data=64, recompute=which)), software=replace(STOKER, compiles="always"))).total
        for which in get_args(Recompute)
    )
    assert plain < selective < plain + (full - plain) / 4


def test_without_recompute_a_block_is_compiled_as_it_is_with_it() -> None:
    found, never = (
        replace(setting(Layout(data=64, recompute="full")), software=replace(STOKER, compiles=choice))
        for choice in ("measured", "never")
    )
    assert causes_of(found) == causes_of(never)


def test_linear_attention_takes_the_same_time_a_token_in_rows_of_any_length() -> None:
    shape = shape_of_config({"model_type": "qwen3_5_text", "num_hidden_layers": 4})
    linear, full = shape.layer(0), shape.layer(3)

    def seconds(layer: Layer, seq_len: int) -> float:
        rows = Setting(TrainingWork(shape, seq_len, 64), CLUSTER, Layout(data=64), 1, software=FREE)
        return block_pass(rows, layer, PERFECT).forward / seq_len

    assert seconds(linear, 65536) == pytest.approx(seconds(linear, 4096), rel=1e-6)
    assert seconds(full, 65536) > 1.5 * seconds(full, 4096)
    products = sum(m.forward_flop for m in shape.matmuls(linear))
    assert shape.delta_net is not None
    assert seconds(linear, 4096) == pytest.approx((products + shape.delta_net.forward_flop) / 312e12, rel=0.01)
