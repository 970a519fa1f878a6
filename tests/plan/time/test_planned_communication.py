"""What processes say in a step: the seconds of the step's time, in the places where the planner hides them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stoker.hardware.machines.cluster_file import load_cluster
from stoker.job.layout import Layout, ScheduleName, Shard
from stoker.plan.pipeline.communication import Message, communication_of
from stoker.plan.pipeline.stage_times import timeline_of
from stoker.plan.setting import Setting, TrainingWork
from stoker.plan.shapes.model_names import shape_named
from stoker.plan.time.block_collectives import block_collectives, block_exchanges
from stoker.plan.time.efficiency import efficiency_of
from stoker.plan.time.gradient_traffic import Collective, GradientTraffic, gradient_traffic
from stoker.plan.time.network_cost import CollectiveGroup, collective_seconds
from stoker.plan.time.pass_times import PassTimes
from stoker.plan.time.step_time import data_parallel, exposed_send, step_time


def setting_of(layout: Layout, batch: int = 16, model: str = "llama2-7b") -> Setting:
    work = TrainingWork(shape_named(model), 4096, batch)
    return Setting(work, load_cluster(f"{layout.world}xA100-80GB"), layout, 1)


def said_in(setting: Setting, drawn: int | None = None) -> tuple[tuple[Message, ...], ...]:
    after = step_time(setting).parts["data parallel"]
    timeline = timeline_of(setting, micro_batches=drawn)
    return communication_of(setting, timeline, after=after, of=setting.micro_batches)


def test_hidden_collectives_share_what_is_not_exposed() -> None:
    moved = Collective("all-gather", 3.0, "backward"), Collective("reduce-scatter", 1.0, "backward")
    traffic = GradientTraffic((*moved, Collective("all-reduce", 2.0, "nothing")), exposed=4.0)
    assert traffic.hidden == pytest.approx((1.5, 0.5, 0.0))
    assert GradientTraffic().hidden == ()


@pytest.mark.parametrize("shard", ["none", "zero1", "zero2", "zero3"])
def test_the_collectives_of_gradients_take_what_the_step_time_says(shard: Shard) -> None:
    layout = Layout(data=8, shard=shard, shard_size=1 if shard == "none" else 8)
    setting = setting_of(layout)
    traffic = data_parallel(setting, PassTimes().stages(setting), efficiency_of(setting.cluster.device))
    (said,) = said_in(setting)
    exposed = sum(message.exposed for message in said)
    assert exposed == pytest.approx(step_time(setting).parts["data parallel"]) and exposed > 0
    for kind in {each.kind for each in traffic.collectives}:
        whole = sum(each.seconds for each in traffic.collectives if each.kind == kind)
        assert sum(message.seconds for message in said if message.kind == kind) == pytest.approx(whole)
    kinds = {"none": {"all-reduce"}}.get(shard, {"all-gather", "reduce-scatter"})
    assert {message.kind for message in said} == kinds
    end = timeline_of(setting).seconds
    beside = {message.micro_batch for message in said if not message.exposed}
    assert beside == ({setting.micro_batches - 1} if shard in ("none", "zero1") else {0, 1})
    assert all(message.start >= end - 1e-9 for message in said if message.exposed)
    assert all(message.end <= end + 1e-9 and message.seconds <= message.end - message.start for message in said[:1])


def test_of_fewer_micro_batches_each_has_what_it_has_of_all() -> None:
    setting = setting_of(Layout(data=8, shard="zero3", shard_size=8), batch=64)
    (few,), (all_,) = said_in(setting, 2), said_in(setting)
    first = [[m.seconds for m in said if m.kind == "all-gather" and m.micro_batch == 1] for said in (few, all_)]
    assert first[0] == pytest.approx(first[1]) and len(first[0]) == 2


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_exchanges_within_blocks_are_as_long_as_they_make_a_pass(recompute: str) -> None:
    setting = setting_of(replace(Layout(tensor=4, pipeline=2), recompute=recompute))  # type: ignore[arg-type]
    forward, backward = block_collectives(
        setting, next(iter(setting.stage_blocks[0])), efficiency_of(setting.cluster.device)
    )
    for stage, said in enumerate(said_in(setting)):
        exchanged = [message for message in said if message.kind == "tensor"]
        assert len(exchanged) == 2 * setting.micro_batches
        blocks = sum(setting.stage_blocks[stage].values())
        passes = {round(message.seconds / blocks, 12) for message in exchanged}
        assert passes == {round(forward, 12), round(backward + (forward if recompute == "full" else 0), 12)}
        assert all(message.exposed == message.seconds < message.end - message.start for message in exchanged)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zero-bubble", "zbv"])
def test_no_pass_begins_before_it_was_sent_its_input(schedule: ScheduleName) -> None:
    setting = setting_of(Layout(pipeline=4, schedule=schedule))
    timeline, last = timeline_of(setting), setting.layout.stages_per_process * 4 - 1
    home = {span.stage: at for at, spans in enumerate(timeline.processes) for span in spans}
    starts = {span[:3]: span.start for spans in timeline.processes for span in spans}
    way = exposed_send(setting, efficiency_of(setting.cluster.device))
    count = 0
    for at, said in enumerate(said_in(setting)):
        for message in said:
            span = next(span for span in timeline.processes[at] if abs(span.end - (message.end - way)) < 1e-9)
            to = span.stage + 1 if span.kind == "forward" else span.stage - 1
            assert message.kind == "send" and message.exposed == way and home[to] != at
            assert starts[(span.kind, to, span.micro_batch)] >= message.end - 1e-9
            count += 1
    crossed = sum(home[stage] != home[stage + 1] for stage in range(last))
    assert count == 2 * crossed * setting.micro_batches


def test_one_process_says_nothing() -> None:
    assert said_in(setting_of(Layout())) == ((),)


@pytest.mark.parametrize(
    ("shard", "precision", "sent", "gathered_and_scattered"),
    [
        ("none", "bf16", 2, 2 + 2),
        ("none", "fp16", 4, 2 + 2),
        ("zero1", "bf16", 2, 2 + 2),
        ("none", "fp32", 4, 4 + 4),
        ("zero1", "fp32", 4, 4 + 4),
    ],
)
def test_hidden_states_are_sent_in_the_type_that_blocks_compute_in(
    shard: Shard, precision: str, sent: int, gathered_and_scattered: int
) -> None:
    """Under float16 hidden states are float32 without sharding; regions of products get and give their type."""
    layout = Layout(data=2, shard=shard, shard_size=2, tensor=2, sequence=True, pipeline=2)
    setting = setting_of(layout)
    setting = replace(setting, work=replace(setting.work, precision=precision))
    free = replace(setting.cluster, link_latency_s=0.0, network_latency_s=0.0)
    setting = replace(setting, cluster=free)
    efficiency, shape = efficiency_of(free.device), setting.shape
    rate = free.device.link_gbs * 1e9 * efficiency.link
    hidden = 4096 * shape.width
    assert exposed_send(setting, efficiency) == pytest.approx(setting.software.exposed_sends * sent * hidden / 2 / rate)
    exchange = block_exchanges(setting, shape.layer(0), efficiency)["tensor"]
    one = hidden / 2 * gathered_and_scattered / rate  # half of the ring's bytes, for two processes
    assert (exchange.forward, exchange.backward) == pytest.approx((2 * one, 2 * one))


def test_stages_are_as_far_apart_as_the_processes_of_one() -> None:
    """All eight processes of a node send to the next one at the same time."""
    setting = setting_of(Layout(data=2, tensor=2, context=2, pipeline=2))
    setting = replace(setting, cluster=replace(setting.cluster, network_latency_s=0.0))
    efficiency = efficiency_of(setting.cluster.device)
    message = 4096 / 2 * setting.shape.width * 2
    rate = setting.cluster.network_gbs * 1e9 * efficiency.network
    assert exposed_send(setting, efficiency) == pytest.approx(setting.software.exposed_sends * 8 * message / rate)


def test_weights_that_the_host_keeps_are_gathered_in_float32() -> None:
    setting = setting_of(Layout(data=8, shard="zero3", shard_size=8))
    seconds = []
    for offload in ("none", "params"):
        found = replace(setting, layout=replace(setting.layout, offload=offload))
        free = replace(found, cluster=replace(found.cluster, link_latency_s=0.0))
        traffic = gradient_traffic(free, efficiency_of(free.cluster.device), compute=0.0, last=0.0)
        seconds.append(sum(each.seconds for each in traffic.collectives if each.kind == "all-gather"))
    assert seconds[1] == pytest.approx(2 * seconds[0])


def test_a_pipelines_unsharded_gradients_are_summed_after_all_passes() -> None:
    """No wrapper sums them beside the backward pass (`Gradients.finish`); other programs hide a part."""
    setting = setting_of(Layout(data=4, pipeline=2))
    efficiency = efficiency_of(setting.cluster.device)
    traffic = gradient_traffic(setting, efficiency, compute=1e9, last=1e9)
    assert traffic.exposed == sum(each.seconds for each in traffic.collectives) > 0
    assert {each.beside for each in traffic.collectives} == {"nothing"}
    other = replace(setting, software=replace(setting.software, name="another", memory=lambda _setting, _stage: {}))
    assert gradient_traffic(other, efficiency, compute=1e9, last=1e9).exposed < traffic.exposed


def traffic_of(layout: Layout) -> GradientTraffic:
    """The collectives of a step on nodes of eight without latencies, beside which nothing is computed."""
    setting = setting_of(layout, batch=64)
    cluster = replace(setting.cluster, link_latency_s=0.0, network_latency_s=0.0)
    return gradient_traffic(replace(setting, cluster=cluster), efficiency_of(cluster.device), compute=0.0, last=0.0)


def test_powersgd_sends_two_factors_in_the_place_of_a_square_matrix() -> None:
    whole, compressed = (
        traffic_of(Layout(data=8, shard="none", shard_size=1, **more)).exposed  # type: ignore[arg-type]
        for more in ({}, {"compress": "powersgd", "compress_rank": 64})
    )
    assert compressed == pytest.approx(whole * 2 * 64 / 4096, rel=1e-6)


def test_islands_average_float32_weights_after_some_steps() -> None:
    once, alone = (
        traffic_of(Layout(data=16, shard="none", shard_size=1, islands=2, sync_every=steps)) for steps in (1, 10)
    )
    between = once.collectives[-1]
    assert between.beside == "nothing" and alone.collectives[-1].seconds == pytest.approx(between.seconds / 10)
    assert once.exposed - alone.exposed == pytest.approx(0.9 * between.seconds)
    cluster = replace(load_cluster("16xA100-80GB"), network_latency_s=0.0, link_latency_s=0.0)
    size = 4 * shape_named("llama2-7b").parameters
    of_all = collective_seconds("all-reduce", size, CollectiveGroup(2, 8), cluster, efficiency_of(cluster.device))
    assert between.seconds == pytest.approx(of_all, rel=1e-6)


def test_shards_on_a_node_sum_theirs_over_the_nodes() -> None:
    zero3 = traffic_of(Layout(data=16, shard="zero3", shard_size=8))
    forward, backward = (each.seconds for each in zero3.collectives if each.kind == "all-gather")
    assert forward == backward
    zero2 = traffic_of(Layout(data=16, shard="zero2", shard_size=8))
    across = [each for traffic in (zero2, zero3) for each in traffic.collectives if each.kind == "all-reduce"]
    assert [each.beside for each in across] == ["nothing", "last"]
    assert zero2.exposed == pytest.approx(sum(each.seconds for each in zero2.collectives))
    cluster = replace(load_cluster("16xA100-80GB"), network_latency_s=0.0, link_latency_s=0.0)
    size = 4 * shape_named("llama2-7b").parameters / 8
    of_all = collective_seconds("all-reduce", size, CollectiveGroup(2, 8), cluster, efficiency_of(cluster.device))
    assert [each.seconds for each in across] == pytest.approx([of_all] * 2, rel=1e-6)


@pytest.mark.parametrize(("shard", "gathers", "scatters"), [("zero1", 1, 1), ("zero2", 1, 4), ("zero3", 4, 4)])
def test_collectives_of_every_micro_batch_and_of_the_step(shard: Shard, gathers: int, scatters: int) -> None:
    """ZeRO-3 gathers weights for every pass, and from ZeRO-2 on gradients are scattered after every backward pass."""
    efficiency = efficiency_of(setting_of(Layout(data=8)).cluster.device)
    one, four = (
        gradient_traffic(
            setting_of(Layout(data=8, shard=shard, shard_size=8), batch=8 * passes), efficiency, compute=0.0, last=0.0
        )
        for passes in (1, 4)
    )
    for kind, times in (("all-gather", gathers), ("reduce-scatter", scatters)):
        seconds = [sum(each.seconds for each in traffic.collectives if each.kind == kind) for traffic in (one, four)]
        assert seconds[1] == pytest.approx(times * seconds[0]) and seconds[0] > 0


def test_islands_average_the_shards_of_each_process() -> None:
    whole, shards = (
        traffic_of(Layout(data=16, shard=shard, shard_size=size, islands=2, sync_every=1)).collectives[-1]
        for shard, size in (("none", 1), ("zero3", 8))
    )
    assert shards.kind == whole.kind == "all-reduce" and shards.seconds == pytest.approx(whole.seconds / 8)
