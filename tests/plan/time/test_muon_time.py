"""Muon's products, as counted and as its step computes them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from stoker.hardware.machines.cluster import cluster_of
from stoker.hardware.machines.cluster_file import load_cluster
from stoker.hardware.machines.device_names import device_kind
from stoker.job.layout import Layout
from stoker.models.prepare_architecture import training_form
from stoker.plan.setting import Setting, TrainingWork
from stoker.plan.shapes.model_names import shape_named
from stoker.plan.shapes.shape_of_config import shape_of_config
from stoker.plan.software import STOKER
from stoker.plan.time.efficiency import Efficiency
from stoker.plan.time.muon_time import AT_ONCE, ITERATIONS, muon_seconds, products_of, stepped_matrices
from stoker.plan.time.step_time import step_time
from stoker.train.optim import muon as training
from stoker.train.optim import orthogonalise
from stoker.train.optim.muon import Muon, matrices_of

GATED = {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 160}
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 64, "n_head": 8, "n_inner": 160, "n_layer": 2},
    "bloom": {"hidden_size": 64, "n_head": 8, "n_layer": 2},
    **{name: {**GATED, "num_hidden_layers": 2} for name in ("llama", "phi3")},
    "mixtral": {**GATED, "num_hidden_layers": 2, "num_local_experts": 4},
}
MUON = replace(STOKER, muon=True)


@pytest.mark.parametrize("family", CONFIGS)
def test_its_products_are_counted(family: str) -> None:
    config = AutoConfig.for_model(
        family, **CONFIGS[family], vocab_size=256, bos_token_id=0, eos_token_id=1, pad_token_id=None
    )
    model = AutoModelForCausalLM.from_config(config)
    training_form(model)
    chosen = matrices_of(model)
    stepped = [p for p in model.parameters() if id(p) in chosen]
    for parameter in stepped:
        parameter.grad = torch.randn_like(parameter)
    with FlopCounterMode(display=False) as counter:
        Muon([{"params": stepped}], lr=0.1).step()
    work = TrainingWork(shape_of_config(config.to_dict()), 64, 1)
    setting = Setting(work, cluster_of(device_kind("cpu"), gpus=1, per_node=1), Layout(), 1)
    counted = sum(
        2 * ITERATIONS * count * sum(m * n * k for m, n, k in products_of(*sizes))
        for sizes, count in stepped_matrices(setting, 0).items()
    )
    assert counted == counter.get_total_flops()


def test_a_matrix_is_orthogonalised_by_one_process() -> None:
    """More processes than matrices do not shorten the step."""
    free = Efficiency(matmul=1.0, half_rows=0.0, half_width=0.0, link=1e9, network=1e9, start=0.0)
    work = TrainingWork(replace(shape_named("llama3-8b"), layers=1), 4096, 64)
    cluster = replace(load_cluster("64xH100"), link_latency_s=0.0, network_latency_s=0.0)
    small, large = 4096, 14336
    flop = 2 * ITERATIONS * (2 * small * small * large + small**3)
    seconds = muon_seconds(Setting(work, cluster, Layout(data=64), 1, software=MUON), free)
    assert seconds == pytest.approx(flop / cluster.device.peak("bf16"), rel=1e-4)


def test_islands_share_nothing() -> None:
    work, efficiency = TrainingWork(shape_named("llama3-8b"), 4096, 64), Efficiency()
    alone, beside = (
        muon_seconds(Setting(work, load_cluster(name), layout, 1, software=MUON), efficiency)
        for name, layout in (("8xH100", Layout(data=8)), ("16xH100", Layout(data=16, islands=2, sync_every=10)))
    )
    assert beside == alone


def test_processes_share_them_and_exchange_the_updates() -> None:
    work = TrainingWork(shape_named("llama3-8b"), 4096, 64)
    cluster, ideal = load_cluster("8xH100"), Efficiency(matmul=1.0, half_rows=0.0, half_width=0.0)
    adamw = Setting(work, replace(cluster, link_latency_s=0.0), Layout(data=8), 1)
    muon = replace(adamw, software=MUON)
    matrices = stepped_matrices(muon, 0)
    products = sum(
        2 * ITERATIONS * count * sum(m * n * k for m, n, k in products_of(*sizes)) for sizes, count in matrices.items()
    )
    share = products / 8 / cluster.device.peak("bf16")
    updates = 2 * sum(count * rows * columns for (rows, columns), count in matrices.items())
    rate = cluster.device.link_gbs * 1e9 * ideal.link
    more = step_time(muon, ideal).total - step_time(adamw, ideal).total
    assert more == pytest.approx(share + 7 / 8 * updates / rate)
    sharded = replace(muon, layout=Layout(data=8, shard="zero3", shard_size=8))
    assert muon_seconds(sharded, ideal) == pytest.approx(share + 2 * 7 / 8 * updates / 8 / rate)
    hybrid = replace(muon, layout=Layout(data=8, shard="zero3", shard_size=2))
    sent = 2 * 1 / 2 * updates / 4 / 2 + 3 / 4 * updates / 2
    assert muon_seconds(hybrid, ideal) == pytest.approx(share + sent / rate)


def test_experts_are_not_exchanged_among_shards() -> None:
    work = TrainingWork(shape_named("mixtral-8x7b"), 4096, 64)
    setting = Setting(work, load_cluster("8xH100"), Layout(data=8), 1, software=MUON)
    every, few = (sum(stepped_matrices(setting, 0, experts=experts).values()) for experts in (True, False))
    assert every - few == 2 * 8 * work.shape.layers


def test_exchanges_are_as_large_as_those_of_the_step() -> None:
    assert (AT_ONCE, ITERATIONS) == (training.AT_ONCE, orthogonalise.ITERATIONS)


def test_a_critic_with_adapters_takes_no_more() -> None:
    work = TrainingWork(shape_named("llama3-8b"), 4096, 64)
    critic = replace(work, tuning="lora")
    adamw = Setting(replace(work, critic=critic), load_cluster("8xH100"), Layout(data=8), 1)
    muon = replace(adamw, software=MUON)
    times = [step_time(setting).parts for setting in (adamw, muon)]
    assert times[0]["critic"] == times[1]["critic"]
    assert times[0]["optimizer"] < times[1]["optimizer"]
