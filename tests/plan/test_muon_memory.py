"""The bytes of Muon's step, as counted and as PyTorch's own memory profile has them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from counted import peak_allocated
from torch import nn
from torch.profiler import profile

from stoker.hardware.machines.cluster import cluster_of
from stoker.hardware.machines.cluster_file import load_cluster
from stoker.hardware.machines.device_names import device_kind
from stoker.job.layout import Layout
from stoker.plan.memory.muon_memory import muon_bytes
from stoker.plan.memory.stoker_memory import STEP, eager_parts
from stoker.plan.setting import Setting, TrainingWork
from stoker.plan.shape import Shape
from stoker.plan.software import STOKER
from stoker.train.optim import muon as training
from stoker.train.optim.muon import Muon

MUON = replace(STOKER, muon=True)
SHAPE = Shape("test", layers=2, width=128, heads=2, kv_heads=2, head_size=64, mlp_width=384, vocabulary=512)


@pytest.mark.parametrize(("device", "dtype"), [("h100", torch.bfloat16), ("cpu", torch.float32)])
@pytest.mark.parametrize("at_once", [1 << 18, 1 << 26])
def test_the_peak_of_a_step_is_as_counted(
    device: str, dtype: torch.dtype, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "_arithmetic", lambda _: dtype)
    monkeypatch.setattr(training, "AT_ONCE", at_once)
    monkeypatch.setattr("stoker.plan.memory.muon_memory.AT_ONCE", at_once)
    weights = [
        nn.Parameter(torch.randn(outputs, matmul.inputs))
        for layer in range(SHAPE.layers)
        for matmul in SHAPE.layer_matmuls(layer)
        for outputs in matmul.modules
    ]
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    optimizer = Muon([{"params": weights}], lr=0.1)
    optimizer.step()
    with profile(profile_memory=True) as found:
        optimizer.step()
    cluster = cluster_of(device_kind(device), gpus=1, per_node=1)
    setting = Setting(TrainingWork(SHAPE, 64, 1), cluster, Layout(), 1, software=MUON)
    assert peak_allocated(found) == pytest.approx(muon_bytes(setting, 0), rel=0.03)  # scratch of products in bfloat16


def test_a_step_may_hold_most() -> None:
    few = Setting(TrainingWork(SHAPE, 64, 1), load_cluster("1xH100"), Layout(), 1, software=MUON)
    parts, moment = eager_parts(few, 0)
    assert (moment, parts["updates"]) == (STEP, muon_bytes(few, 0))
    assert "updates" not in eager_parts(replace(few, software=STOKER), 0)[0]


def test_processes_share_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = replace(SHAPE, layers=8, mlp_width=128)
    one = 2 * 128 * 128  # bytes of each of 48 matrices, of which a process steps 6
    alone = Setting(TrainingWork(shape, 64, 8), load_cluster("8xH100"), Layout(), 1, software=MUON)
    assert muon_bytes(alone, 0) == 5 * 48 * one
    copies = replace(alone, layout=Layout(data=8))
    assert muon_bytes(copies, 0) == (6 + 48 + 6) * one  # when the results are gathered
    monkeypatch.setattr("stoker.plan.memory.muon_memory.AT_ONCE", 16 * 128 * 128)
    largest = replace(copies, work=replace(copies.work, shape=replace(shape, mlp_width=1024)))
    assert muon_bytes(largest, 0) == (8 + 2 * 8 + 2) * one  # iterations of one matrix; eight are gathered in pieces
    monkeypatch.undo()
    shards = replace(alone, layout=Layout(data=8, shard="zero3", shard_size=8))
    assert muon_bytes(shards, 0) == (3 + 4) * 6 * one  # rows twice and whole matrices stay beside the iterations
    uneven = replace(alone, layout=Layout(data=5, shard="zero3", shard_size=5))
    assert muon_bytes(uneven, 0) == pytest.approx((3 * 48 / 5 + 4 * 10) * one)  # one process steps 10


def test_a_process_holds_whole_matrices_however_many_share_them() -> None:
    """The largest one: its momentum, the matrix before and after an iteration, and two products of its rows."""
    work = TrainingWork(replace(SHAPE, layers=1), 64, 64)
    counted = [
        muon_bytes(Setting(work, load_cluster(f"{world}xH100"), Layout(data=world), 1, software=MUON), 0)
        for world in (8, 64)
    ]
    largest = 2 * (3 * 128 * 384 + 2 * 128**2)
    assert min(counted) >= largest
