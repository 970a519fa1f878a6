"""Why a plan: its parts add up, what is named vanishes when it is taken away, and no searched change gives more."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stoker.hardware.machines.cluster import Cluster, cluster_of
from stoker.hardware.machines.cluster_file import load_cluster
from stoker.hardware.machines.device_names import device_kind
from stoker.job.layout import Layout
from stoker.plan.answer.alternatives import alternatives, kind_of, misfit
from stoker.plan.answer.explain import MEMORY, TWICE_MEMORY, bottlenecks, faster_changes, plan_of
from stoker.plan.answer.time_breakdown import BUBBLE, CONTEXT, DATA, LAUNCH, RECOMPUTE, TENSOR, causes_of
from stoker.plan.search import SearchResult, search
from stoker.plan.setting import Setting, TrainingWork
from stoker.plan.shapes.model_names import shape_named
from stoker.plan.time.step_time import step_time

GIB = 2**30
LLAMA = TrainingWork(shape_named("llama3-8b"), 4096, 64)
LAYOUTS = [
    Layout(data=32, shard="zero3", shard_size=32, recompute="full"),
    Layout(data=4, tensor=8, sequence=True),
    Layout(data=2, tensor=4, sequence=True, pipeline=4),
    Layout(data=2, tensor=2, sequence=True, pipeline=4, schedule="interleaved", context=2, recompute="full"),
    Layout(data=1, shard="zero1", context=4, pipeline=8),
]


def setting_of(layout: Layout, words: str = "4x8xH100") -> Setting:
    return Setting(LLAMA, load_cluster(words), layout, 1)


def found_on(words: str, work: TrainingWork = LLAMA) -> SearchResult:
    return search(work, load_cluster(words))


@pytest.mark.parametrize("layout", LAYOUTS, ids=Layout.describe)
def test_the_causes_add_up_to_the_step(layout: Layout) -> None:
    setting = setting_of(layout)
    causes = causes_of(setting)
    assert sum(cause.seconds for cause in causes.values()) == pytest.approx(step_time(setting).total)
    assert all(cause.seconds > -1e-9 for cause in causes.values())
    assert (causes[TENSOR].seconds > 0) == (layout.tensor > 1)
    assert (causes[RECOMPUTE].seconds > 0) == (layout.recompute == "full")
    assert (BUBBLE in causes and causes[BUBBLE].seconds > 0) == (layout.pipeline > 1)
    assert (CONTEXT in causes and causes[CONTEXT].seconds > 0) == (layout.context > 1)


def test_collectives_name_the_link_that_they_cross() -> None:
    inside = causes_of(setting_of(Layout(data=4, tensor=8, sequence=True)))
    across = causes_of(setting_of(Layout(data=2, tensor=16, sequence=True)))
    assert inside[TENSOR].link == "NVLink" and across[TENSOR].link == "the network"
    assert causes_of(setting_of(Layout(data=8), "8xH100"))[DATA].link == "NVLink"
    assert str(inside[DATA]) == "data-parallel collectives over the network" and str(inside[LAUNCH]) == LAUNCH


def test_a_faster_link_takes_away_what_is_spent_on_it_and_nothing_else() -> None:
    setting = setting_of(Layout(data=4, tensor=8, sequence=True))
    device = setting.cluster.device
    faster = replace(
        setting, cluster=replace(setting.cluster, device=replace(device, link_gbs=1e9), link_latency_s=0.0)
    )
    before, after = causes_of(setting), causes_of(faster)
    assert after[TENSOR].seconds < 1e-3 * before[TENSOR].seconds
    same = [name for name in before if name not in (TENSOR, DATA)]
    assert [after[name].seconds for name in same] == pytest.approx([before[name].seconds for name in same])


@pytest.mark.parametrize("words", ["8xH100", "2x8xA100-40GB", "4xA100-40GB"])
@pytest.mark.slow
def test_what_helps_is_a_plan_of_the_changed_job_and_nothing_more(words: str) -> None:
    """The gains are those of searching everything, from below: a search near the plan finds at most those."""
    found = found_on(words)
    best, cluster = found.plans[0], load_cluster(words)
    given = faster_changes(best, on=words)
    before = best.speed.tokens_per_s
    for help_ in given:
        assert help_.plan.speed.tokens_per_s == pytest.approx(before * (1 + help_.gain))
        if help_.words.startswith("train.batch="):
            assert help_.plan.setting.work.global_batch == 2 * LLAMA.global_batch
            assert help_.words == f"train.batch={2 * LLAMA.global_batch}"
    assert [help_.gain for help_ in given] == sorted((help_.gain for help_ in given), reverse=True)
    roomy = replace(cluster, device=replace(cluster.device, memory_gib=2 * cluster.device.memory_gib))
    everything = max(plan.speed.tokens_per_s for plan in search(LLAMA, roomy).plans) / before - 1
    twice = [help_.gain for help_ in given if help_.change == TWICE_MEMORY]
    assert (twice or [0.0])[0] <= everything + 1e-9
    if everything > 0.05:  # a gain that large is seen near the plan as well
        assert twice[0] > everything / 2


@pytest.mark.slow
def test_what_binds_is_the_whole_step() -> None:
    best = found_on("2x8xA100-40GB").plans[0]
    given = bottlenecks(best, faster_changes(best, on="2x8xA100-40GB"))
    assert sum(bind.seconds for bind in given if bind.resource != MEMORY) == pytest.approx(best.seconds)
    assert all(bind.seconds > 0 for bind in given) and given[0].resource == "compute"
    for bind in given:
        if bind.causes:
            assert sum(cause.seconds for cause in bind.causes) == pytest.approx(bind.seconds, rel=1e-6)


@pytest.mark.slow
def test_memory_binds_where_there_is_little_of_it() -> None:
    """8 billion parameters on 4 devices of 40 GB take recomputation or offload; on devices of 80 GB much less."""
    tight, roomy = found_on("4xA100-40GB").plans[0], found_on("4xA100-80GB").plans[0]
    seconds = [
        next((bind.seconds for bind in bottlenecks(plan, faster_changes(plan, on="")) if bind.resource == MEMORY), 0.0)
        / plan.seconds
        for plan in (tight, roomy)
    ]
    assert seconds[0] > seconds[1] and seconds[0] > 0.05


def test_a_slow_network_binds_a_layout_that_needs_it() -> None:
    """At a fortieth of the rate between nodes most of the step is collectives, and nothing else has changed."""
    fast = setting_of(Layout(data=32, shard="zero3", shard_size=32, recompute="full"))
    slow = replace(fast, cluster=replace(fast.cluster, network_gbs=fast.cluster.network_gbs / 40))
    before, after = (bottlenecks(plan_of(setting), []) for setting in (fast, slow))
    assert before[0].resource == "compute" and after[0].resource == "link"
    assert {b.resource: b.seconds for b in before}["compute"] == pytest.approx(after[1].seconds)


def test_alternatives_differ_in_kind_and_each_has_its_reason() -> None:
    found = found_on("4x8xH100")
    best = found.plans[0]
    given = alternatives(found)
    kinds = [kind_of(other.plan) for other in given]
    assert len(set(kinds)) == len(kinds) and kind_of(best) not in kinds
    fitting = [other for other in given if other.plan.fits]
    assert fitting == given[: len(fitting)]
    assert [other.slower for other in fitting] == sorted(other.slower for other in fitting)
    assert all(other.slower >= 0 for other in fitting)
    for other in given:
        assert other.slower == pytest.approx(other.plan.seconds / best.seconds - 1)
        assert other.reason.startswith(("does not", "may not")) == (not other.plan.fits)
    called = {other.called: other for other in given}
    flat = {"data": 32, "tensor": 1, "pipeline": 1, "context": 1}
    named = {
        "plain data parallel (DDP)": {**flat, "shard": "none"},
        "ZeRO-3 over everything": {**flat, "shard": "zero3", "shard_size": 32},
        "tensor over a node": {"tensor": 8},
    }
    for name, values in named.items():  # each is there, unless it has won
        plan = called[name].plan if name in called else best
        assert {key: getattr(plan.setting.layout, key) for key in values} == values
    assert "tensor-parallel collectives over NVLink" in called["tensor over a node"].reason


def test_tensor_over_a_node_takes_the_most_processes_that_divide_it() -> None:
    """Five heads of keys and values: four of the node's eight processes."""
    found = search(TrainingWork(shape_named("smollm2-360m"), 2048, 32), load_cluster("8xH100"))
    called = {other.called: other for other in alternatives(found)}
    assert called["tensor over a node"].plan.setting.layout.tensor == 4


def test_twice_the_batch_is_that_of_the_critic_too() -> None:
    work = TrainingWork(shape_named("smollm2-360m"), 2048, 32)
    changed = replace(work, critic=work).resized(global_batch=64)
    assert changed.critic is not None and (changed.global_batch, changed.critic.global_batch) == (64, 64)
    changed = changed.resized(seq_len=512)
    assert changed.critic is not None and (changed.seq_len, changed.critic.seq_len) == (512, 512)
    assert changed.critic.global_batch == 64


def test_no_plan_of_a_named_kind_is_faster() -> None:
    """The best of plain data parallel and of ZeRO-3, by looking at all of them."""
    found = found_on("2x8xH100")
    for other in alternatives(found):
        if other.called not in ("plain data parallel (DDP)", "ZeRO-3 over everything"):
            continue
        layout = other.plan.setting.layout
        plans = []
        for micro_batch in (1, 2, 4):
            for recompute in ("none", "full"):
                spread = replace(layout, recompute=recompute)
                plans.append(plan_of(Setting(LLAMA, load_cluster("2x8xH100"), spread, micro_batch)))
        fitting = [plan for plan in plans if plan.fits]
        if fitting:
            assert other.plan.seconds == pytest.approx(min(plan.seconds for plan in fitting))
        else:
            assert other.plan.memory.upper == pytest.approx(min(plan.memory.upper for plan in plans))


def test_what_does_not_fit_says_by_how_much() -> None:
    plan = plan_of(setting_of(Layout(data=32)))
    need, have = plan.memory.upper / GIB, plan.capacity / GIB
    assert misfit(plan) == f"does not fit: needs up to {need:.1f} GiB (mostly optimizer), available {have:.1f} GiB"
    layout = Layout(data=32, shard="zero1", shard_size=32, offload="optimizer", recompute="full")
    cluster = replace(load_cluster("4x8xH100"), host_memory_gib=8.0)
    small_host = plan_of(Setting(LLAMA, cluster, layout, 1))
    assert not small_host.fits and misfit(small_host).startswith("does not fit the host:")


def test_the_jobs_own_layout_is_among_them() -> None:
    found = found_on("8xH100")
    asked = plan_of(setting_of(Layout(data=1, pipeline=8, schedule="gpipe"), "8xH100"))
    called = {other.called: other for other in alternatives(found, asked=asked)}
    assert called["as the job says"].plan is asked
    best = plan_of(found.plans[0].setting)
    assert "as the job says" not in {other.called for other in alternatives(found, asked=best)}


def test_one_device_has_few_alternatives() -> None:
    cluster: Cluster = load_cluster("1xH100")
    found = search(TrainingWork(shape_named("gpt2"), 1024, 8), cluster)
    assert all(other.plan.setting.layout.world == 1 for other in alternatives(found))
    assert all(other.called != "plain data parallel (DDP)" for other in alternatives(found))


def test_a_processor_is_not_advised_to_offload() -> None:
    found = search(TrainingWork(shape_named("gpt2"), 1024, 8), cluster_of(device_kind("cpu"), gpus=2))
    kinds = alternatives(found)
    assert kinds and all(other.plan.setting.layout.offload == "none" for other in kinds)
