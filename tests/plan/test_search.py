"""The search against looking at everything."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import pytest

from feasible_settings import feasible_settings
from stoker.hardware.machines.cluster import cluster_of
from stoker.hardware.machines.device_names import device_kind
from stoker.plan import trainable_params
from stoker.plan.memory.memory_formulas import allocatable_bytes, peak_memory
from stoker.plan.search import KEPT, TIE, search
from stoker.plan.setting import Setting, TrainingWork
from stoker.plan.shapes.model_names import shape_named
from stoker.plan.time.step_time import step_time
from stoker.plan.trainable_params import Adapters, whole_elements


@pytest.mark.parametrize(
    ("model", "device", "gpus", "batch"),
    [
        ("gpt2", "T4", 2, 16),
        ("llama3-8b", "H100", 8, 32),
        ("llama2-13b", "A100-40GB", 16, 64),
        ("gpt-neox-20b", "A100", 8, 24),
    ],
)
def test_no_plan_that_fits_is_faster(model: str, device: str, gpus: int, batch: int) -> None:
    work = TrainingWork(shape_named(model), 1024, batch)
    cluster = cluster_of(device_kind(device), gpus=gpus)
    found = search(work, cluster)
    brute: dict[Setting, float] = {}
    for setting in feasible_settings(work, cluster):
        memory = peak_memory(setting)[1]
        host = memory.host <= cluster.host_memory_gib_per_gpu * 2**30
        if host and memory.upper <= allocatable_bytes(cluster):
            whole = replace(setting, layout=replace(setting.layout, offload="none"))
            if whole == setting or whole not in brute:  # what fits is not offloaded
                brute[setting] = step_time(setting).total
    fastest = sorted(brute.values())
    assert sorted(plan.seconds for plan in found.plans)[:KEPT] == pytest.approx(fastest[:KEPT], rel=1e-12)
    assert found.plans[0].seconds <= fastest[0] * (1 + TIE)
    assert all(plan.setting.layout.world == gpus for plan in found.plans)


def test_what_cannot_fit_names_the_nearest() -> None:
    work = TrainingWork(shape_named("llama3-70b"), 4096, 8)
    found = search(work, cluster_of(device_kind("T4"), gpus=1))
    assert not found.plans and found.nearest is not None and not found.nearest.fits
    layouts = feasible_settings(work, cluster_of(device_kind("T4"), gpus=1))
    assert found.nearest.memory.upper == min(peak_memory(setting)[1].upper for setting in layouts)


def test_only_rows_that_are_split_need_a_length_of_equal_pieces() -> None:
    cluster = cluster_of(device_kind("H100"), gpus=8)
    even, odd = (
        set(feasible_settings(TrainingWork(shape_named("gpt2"), length, 16), cluster)) for length in (4096, 4097)
    )
    assert {s.layout for s in odd} == {s.layout for s in even if s.layout.context == 1} != {s.layout for s in even}


def test_layers_trained_in_full_are_counted_once() -> None:
    shape = replace(shape_named("gpt2"), vocabulary=50_000)  # of no other test
    work = TrainingWork(shape, 1024, 16, tuning="lora", adapters=Adapters(modules=("q_proj",)))
    with patch.object(trainable_params, "whole_elements", wraps=whole_elements) as counted:
        assert search(work, cluster_of(device_kind("A100"), gpus=8)).plans
    assert counted.call_count <= 4
