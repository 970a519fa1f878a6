"""Seconds of the exchanges within a block, from the bytes that each process sends."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stoker.hardware.machines.cluster_file import load_cluster
from stoker.job.layout import Layout
from stoker.plan.setting import Setting, TrainingWork
from stoker.plan.shapes.model_names import shape_named
from stoker.plan.time.block_collectives import Axis, block_exchanges
from stoker.plan.time.efficiency import efficiency_of

TOKENS, BYTES = 4096, 2  # of the row; of a number in 16 bits


def sent_bytes(layout: Layout, axis: Axis, *, model: str = "llama3-8b", expert: int = 1) -> tuple[float, float]:
    """The bytes that a process sends in the passes of a block, in a node without latencies."""
    cluster = replace(load_cluster(f"{layout.world}xA100-80GB"), link_latency_s=0.0)
    setting = Setting(TrainingWork(shape_named(model), TOKENS, 16), cluster, layout, 1, expert=expert)
    efficiency = efficiency_of(cluster.device)
    exchange = block_exchanges(setting, setting.shape.layer(0), efficiency)[axis]
    rate = cluster.device.link_gbs * 1e9 * efficiency.link
    return exchange.forward * rate, exchange.backward * rate


@pytest.mark.parametrize("tensor", [1, 2])
def test_ulysses_exchanges_queries_keys_values_and_results(tensor: int) -> None:
    """A process keeps its half of what it has of its own half of the row (Jacobs et al., 2023, section 3.2)."""
    own, heads, groups, size = TOKENS / 2, 32 / tensor, 8 / tensor, 128
    one_way = own * (heads + 2 * groups + heads) * size * BYTES / 2
    layout = Layout(context=2, context_by="ulysses", tensor=tensor)
    assert sent_bytes(layout, "context") == pytest.approx((one_way, one_way))


@pytest.mark.parametrize("tensor", [1, 2])
def test_gathered_rows_move_the_keys_and_values_of_all_tokens(tensor: int) -> None:
    one_way = TOKENS * 2 * (8 / tensor) * 128 * BYTES * 3 / 4  # each of four processes sends on what the others have
    assert sent_bytes(Layout(context=4, tensor=tensor), "context") == pytest.approx((one_way, one_way))


@pytest.mark.parametrize("sequence", [False, True])
def test_experts_get_a_copy_of_each_token_for_each_of_its_experts_and_give_it_back(sequence: bool) -> None:
    own = TOKENS / (2 if sequence else 1)
    there = own * 8 * 2048 * BYTES * 3 / 4  # eight experts a token; a quarter stays in its process
    layout = Layout(data=4, tensor=2, sequence=sequence)
    sent = sent_bytes(layout, "experts", model="qwen3-30b-a3b", expert=4)
    assert sent == pytest.approx((2 * there, 2 * there))
